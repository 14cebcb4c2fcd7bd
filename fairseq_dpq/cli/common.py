"""What all tools share: errors in one line, progress bars, tables of text, sizes."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any, Callable, Sequence

from fairseq_dpq.files.errors import CheckpointError, DPQConfigError, printable

# Modules that `pip install fairseq-dpq` does not bring, by the extra of setup.py that does.
_EXTRAS = {
    "fairseq": ("fairseq", "fairseq_cli", "hydra", "omegaconf", "sacrebleu", "sentencepiece"),
    "plots": ("matplotlib",),
    "transformers": ("transformers",),
    "triton": ("triton",),
}
_LARGE = 50_000  # rows from which a progress bar is worth its line


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options that every tool has."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle everything in the input, which can run code that is hidden in it",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_exact_logits(parser: argparse.ArgumentParser) -> None:
    """The option of the tools that write compact checkpoints."""
    parser.add_argument(
        "--exact-logits",
        action="store_true",
        help="let tied output layers multiply by the dense table, which takes its memory; else "
        "logits come from the codes, faster, and differ in the last digits",
    )


def missing_extra(error: ModuleNotFoundError) -> str:
    """What to install for a module that belongs to an extra; empty for any other module."""
    name = (error.name or "").split(".")[0]
    extra = next((extra for extra, modules in _EXTRAS.items() if name in modules), None)
    return f"{name} is not installed; pip install 'fairseq-dpq[{extra}]' brings it" if extra else ""


def run(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    """Parse, work, and turn errors into one line and an exit code: 2 for bad input."""
    args = parser.parse_intermixed_args(argv)  # options may stand anywhere
    level = logging.root.manager.disable
    if not args.debug:
        logging.disable(logging.INFO)  # what fairseq says while it loads a model
    try:
        work(args)
    except (CheckpointError, DPQConfigError) as error:
        if args.debug:
            raise
        print(f"{parser.prog}: error: {printable(error)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if args.debug or not missing_extra(error):
            raise
        print(f"{parser.prog}: error: {missing_extra(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RecursionError) as error:
        if args.debug:
            raise
        deep = isinstance(error, RecursionError)
        what = "is nested too deeply" if deep else "needs more memory than there is"
        print(f"{parser.prog}: error: the input {what}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        if args.debug:
            raise
        lines = [line.strip() for line in str(error).splitlines()] or [""]
        first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        print(
            f"{parser.prog}: unexpected {type(error).__name__}: {printable(first)} "
            "(--debug shows where)",
            file=sys.stderr,
        )
        return 1
    finally:
        logging.disable(level)
    return 0


class Bars:
    """Progress bars on a terminal, one after the other, for work on large tables."""

    def __init__(self, least: int = _LARGE) -> None:
        self._bar: Any = None
        self._least = least

    def __call__(self, what: str, total: int) -> Callable[[int], None]:
        self.close()
        if total < self._least:
            return lambda done: None
        from tqdm import tqdm

        # disable=None: none where stderr is not a terminal
        self._bar = tqdm(total=total, desc=what, unit_scale=True, disable=None)
        return self._bar.update

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def used_codes(used: dict[str, int] | None) -> str:
    """How many codes the groups of a table use; nothing for a form without codes."""
    return "-" if used is None else f"{used['min']}/{used['median']}/{used['max']}"


def size(number: int) -> str:
    """A number of bytes, exactly."""
    return f"{number:,}"


def left_text(item: dict[str, Any]) -> str:
    """A table that stays as it is."""
    return f"{item['name']}, {size(item['bytes'])} bytes: {item['why']}"


def notes(table: dict[str, Any], also_ends: str = "") -> list[str]:
    """What the columns do not say of a table: other names, tied outputs, a size that grew."""
    lines = []
    also = [f"also {name}" for name in table["aliases"]]
    also += [f"tied to {name}" for name in table.get("tied_outputs", [])]
    if also:
        lines.append(printable(f"{table['path']}: {', '.join(also)}{also_ends}"))
    lines += [printable(f"{table['path']}: {note}") for note in table.get("notes", [])]
    if table.get("measured_cr", 1) < 1:
        lines.append(
            f"{printable(table['path'])}: larger than the full table; take a smaller --dpq-D or "
            "--dpq-K, or --dpq-share-subspaces"
        )
    return lines
