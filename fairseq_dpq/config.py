"""What an option is: a field of a method's dataclass, with its default, help and rules.

`option` declares one; everything else here reads that declaration: `check_fields` validates, and
the flags of fairseq-train and of the tools are made from it. The options are in `methods/`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import Field, field, fields
from typing import Any, Callable, Iterable, Sequence

from fairseq_dpq.files.errors import DPQConfigError

Format = Callable[[str, Any], str]  # (option, value) -> as the reader knows it


def option(
    default: Any,
    help: str,
    *,
    valid: Callable[[Any], bool] | None = None,
    right: str = "",
    choices: Sequence[str] | None = None,
    needs: str = "",
    shapes: bool = False,
    keeps: bool = False,
    flag: bool = True,
) -> Any:
    """A field of an options dataclass. Its type is int, float, bool or str; None as a default means
    that the method chooses a value (`Method.defaults`).

    Args:
        valid, right: What a value must fulfil, and what an error says of one that does not.
        needs: The option and the value that it depends on, `schedule=paper`.
        shapes: Tensors or their meaning follow it: it must be the same to restore a checkpoint.
        keeps: A resumed training keeps the checkpoint's value, whatever the command says.
        flag: False for a keyword of the layer that fairseq-train does not have.
    """
    rules = {"valid": valid, "right": right, "choices": choices, "needs": needs}
    marks = {"shapes": shapes, "keeps": keeps, "flag": flag}
    return field(default=default, metadata={"help": help, **rules, **marks})


def option_type(f: Field) -> type:
    """int, float, bool or str."""
    name = f.type if isinstance(f.type, str) else f.type.__name__
    return {"int": int, "float": float, "bool": bool, "str": str}[name.split(" ")[0]]


def format_option(name: str, value: Any) -> str:
    """How errors of the layer name an option: `D=48`."""
    return f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}"


def check_fields(options: Any, format: Format = format_option) -> None:
    """Raise DPQConfigError for a value of the wrong type, out of range, or without effect."""
    for f in fields(options):
        value = getattr(options, f.name)
        if value is None and f.default is None:
            continue
        problem = _problem(f, value) or _unmet(f, value, options, format)
        if problem:
            raise DPQConfigError(format(f.name, value) + problem)


def _problem(f: Field, value: Any) -> str:
    kind, rules = option_type(f), f.metadata
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = number and math.isfinite(value) if kind is float else type(value) is kind
    if rules["choices"] is not None and value not in tuple(rules["choices"]):
        return f": choose one of {', '.join(rules['choices'])}"
    if not fits or (rules["valid"] is not None and not rules["valid"](value)):
        return f": {rules['right'] or f'must be a {kind.__name__}'}"
    return ""


def _unmet(f: Field, value: Any, options: Any, format: Format) -> str:
    name, _, wanted = f.metadata["needs"].partition("=")
    if not name or value == f.default:
        return ""
    other = getattr(options, name)
    if other in (None, wanted):  # None: the method chooses it, and this is asked again then
        return ""
    return f" has no effect with {format(name, other)}; use {format(name, wanted)}"


# Flags --------------------------------------------------------------------------------------------


def key(name: str) -> str:
    """The key of an option in a fairseq config: `dpq_K`."""
    return f"dpq_{name}"


def flag(name: str) -> str:
    """The command-line flag of an option: `--dpq-share-subspaces`."""
    return f"--dpq-{name.replace('_', '-')}"


def format_flag(name: str, value: Any) -> str:
    """How errors of a command name an option: `--dpq-D 48`."""
    return flag(name) if isinstance(value, bool) else f"{flag(name)} {value}"


def flag_help(f: Field) -> str:
    """The help text of a flag, with its default."""
    text = f.metadata["help"]
    if f.default not in (None, False, 0, "") and "default" not in text:
        text += f" (default: {f.default})"
    return text.replace("%", "%%")


def add_flags(parser: Any, options: Iterable[Field], *also: str, **defaults: Any) -> None:
    """Add flags to an argparse parser or group. `also` are other names of the flag; `defaults`
    replace those of the fields."""
    for f in options:
        how: dict[str, Any] = {"dest": f.name, "help": flag_help(f)}
        if option_type(f) is bool:
            how["action"] = "store_true"
        else:
            how.update(type=option_type(f), choices=f.metadata["choices"])
        parser.add_argument(*also, flag(f.name), default=defaults.get(f.name, f.default), **how)
        add_lower_case(parser, f.name)


class _Meant(argparse.Action):
    """A flag in the wrong case: an error that names the right one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        raise argparse.ArgumentError(self, f"did you mean {self.const}?")


def add_lower_case(parser: Any, name: str) -> None:
    """Let `--dpq-k` name `--dpq-K`: argparse would take it for an ambiguous prefix of others."""
    right = flag(name)
    if right != right.lower():
        how: Any = {"nargs": "?", "const": right, "action": _Meant, "help": argparse.SUPPRESS}
        parser.add_argument(right.lower(), dest=argparse.SUPPRESS, **how)
