"""`--dpq-*` on the command line: PluginConfig's fields as options of every fairseq task.

fairseq builds its parser from task dataclasses after `--user-dir` is imported; a task without one
gets the same options through its `add_args`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Callable, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from hydra.core.config_store import ConfigStore

from fairseq_dpq.config import DPQConfigError, PluginConfig, flag_fields
from fairseq_dpq.tables import get_option

PREFIX = "dpq_"
_MARK = "_has_dpq_options"
_TYPES = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "int | None": Optional[int],
    "str | None": Optional[str],
}


def key_of(field: dataclasses.Field) -> str:
    """The config key of an option: `dpq_K`; `dpq_no_normalize` for what is on by default."""
    return PREFIX + field.metadata.get("flag", field.name).replace("-", "_")


def flag(name: str) -> str:
    """The command-line flag of a field of PluginConfig."""
    field = next(f for f in flag_fields() if f.name == name)
    return "--" + key_of(field).replace("_", "-")


def say(name: str, value: Any) -> str:
    """How an option is named in an error: `--dpq-D 48`."""
    return flag(name) if isinstance(value, bool) else f"{flag(name)} {value}"


def say_for(options: PluginConfig, decoder: bool) -> Callable[[str, Any], str]:
    """`say` for the options of one table: the decoder's K and D may have flags of their own."""

    def say_own(name: str, value: Any) -> str:
        if decoder and name in ("K", "D") and getattr(options, f"decoder_{name}"):
            name = f"decoder_{name}"
        return say(name, value)

    return say_own


KEYS = [key_of(f) for f in flag_fields()]


def _dataclass_field(field: dataclasses.Field) -> tuple[str, Any, Any]:
    kind: Any = _TYPES[str(field.type)]
    choices = field.metadata.get("choices")
    if choices is not None:
        kind = ChoiceEnum(choices)
        if field.default is None:
            kind = Optional[kind]
    default = not field.default if "flag" in field.metadata else field.default
    help_text = f"DPQ: {field.metadata['help']}"
    if default not in (None, False, 0, "") and "default" not in help_text:
        help_text += f" (default: {default})"
    metadata = {"help": help_text.replace("%", "%%")}
    return key_of(field), kind, dataclasses.field(default=default, metadata=metadata)


_FIELDS = [_dataclass_field(f) for f in flag_fields()]
DPQOptions = dataclasses.make_dataclass("DPQOptions", _FIELDS, bases=(FairseqDataclass,))


def add_to_task(name: str) -> None:
    """Give one registered task the DPQ options, once."""
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

    task = TASK_REGISTRY[name]
    if task.__dict__.get(_MARK):
        return
    setattr(task, _MARK, True)
    dataclass = TASK_DATACLASS_REGISTRY.get(name)
    if dataclass is None:
        task.add_args = staticmethod(_with_options(task.add_args))
        return
    if KEYS[0] not in dataclass.__dataclass_fields__:
        dataclass = dataclasses.make_dataclass(dataclass.__name__, _FIELDS, bases=(dataclass,))
    setattr(task, "__dataclass", dataclass)
    TASK_DATACLASS_REGISTRY[name] = dataclass
    node = dataclass()
    node._name = name
    ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")


def _with_options(add_args: Callable[[Any], None]) -> Callable[[Any], None]:
    def add(parser: Any) -> None:
        add_args(parser)
        gen_parser_from_dataclass(parser, DPQOptions())

    return add


def add_to_parser(parser: Any) -> None:
    """Add the DPQ options to a parser, as a group of their own."""
    group = parser.add_argument_group("DPQ", "compress embedding tables (--dpq-K turns it on)")
    gen_parser_from_dataclass(group, DPQOptions())


def add_to_all_tasks() -> None:
    """Give every task that is registered now the DPQ options."""
    from fairseq.tasks import TASK_REGISTRY

    for name in list(TASK_REGISTRY):
        add_to_task(name)


def has_options(cfg: Any) -> bool:
    """Whether a config carries DPQ options at all."""
    return get_option(cfg, KEYS[0]) is not None


def read_options(cfg: Any) -> PluginConfig:
    """The plugin's options out of a fairseq config of any form."""
    values: dict[str, Any] = {}
    for field in flag_fields():
        value = get_option(cfg, key_of(field))
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None:
            continue
        values[field.name] = not value if "flag" in field.metadata else value
    return PluginConfig(**values)


def to_keys(options: PluginConfig) -> dict[str, Any]:
    """The options as flat config keys, as a checkpoint keeps them."""
    return {
        key_of(f): not getattr(options, f.name)
        if "flag" in f.metadata
        else getattr(options, f.name)
        for f in flag_fields()
    }


def check_options(cfg: Any) -> None:
    """Stop for options that cannot work, before any data is read."""
    options = read_options(cfg)
    if options.enabled:
        for decoder in (False, True):
            options.table_config(decoder).validate(say=say_for(options, decoder))
        return
    changed = [f.name for f in flag_fields() if getattr(options, f.name) != f.default]
    if changed:
        name = changed[0]
        raise DPQConfigError(
            f"{say(name, getattr(options, name))} has no effect without --dpq-K: DPQ is off; add "
            "--dpq-K 32, or leave it out"
        )
