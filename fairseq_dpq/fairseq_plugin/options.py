"""`--dpq-*` on the command line: PluginConfig's fields as options of every fairseq task.

fairseq builds its parser from task dataclasses after `--user-dir` is imported; a task without one
gets the same options through its `add_args`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, Callable, Optional

from fairseq_dpq.config import (
    DPQConfigError,
    PluginConfig,
    add_lower_case,
    flag,
    flag_default,
    flag_fields,
    flag_help,
    flag_type,
    key_of,
    say_flag,
    say_flag_of,
)
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.methods import METHODS

_MARK = "_has_dpq_options"
KEYS = [key_of(f) for f in flag_fields()]


# fairseq is imported inside the functions, because importing it may register the plugin while this
# module is still being imported.


@functools.lru_cache(maxsize=None)
def _fields() -> list[tuple[str, Any, Any]]:
    """The options as fields of a fairseq dataclass."""
    from fairseq.dataclass import ChoiceEnum

    out = []
    for field in flag_fields():
        choices = field.metadata.get("choices")
        kind: Any = flag_type(field) if choices is None else ChoiceEnum(choices)
        if field.default is None:
            kind = Optional[kind]
        metadata = {"help": f"DPQ: {flag_help(field)}"}
        made = dataclasses.field(default=flag_default(field), metadata=metadata)
        out.append((key_of(field), kind, made))
    return out


def _add_dataclass(parser: Any) -> None:
    from fairseq.dataclass import FairseqDataclass
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    options = dataclasses.make_dataclass("DPQOptions", _fields(), bases=(FairseqDataclass,))
    gen_parser_from_dataclass(parser, options())


def add_to_task(name: str) -> None:
    """Give one registered task the DPQ options, once."""
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
    from hydra.core.config_store import ConfigStore

    task = TASK_REGISTRY[name]
    if task.__dict__.get(_MARK):
        return
    setattr(task, _MARK, True)
    dataclass = TASK_DATACLASS_REGISTRY.get(name)
    if dataclass is None:
        task.add_args = staticmethod(_with_options(task.add_args))
        return
    if KEYS[0] not in dataclass.__dataclass_fields__:
        dataclass = dataclasses.make_dataclass(dataclass.__name__, _fields(), bases=(dataclass,))
    setattr(task, "__dataclass", dataclass)
    TASK_DATACLASS_REGISTRY[name] = dataclass
    node = dataclass()
    node._name = name
    ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")


def _with_options(add_args: Callable[[Any], None]) -> Callable[[Any], None]:
    def add(parser: Any) -> None:
        add_args(parser)
        _add_dataclass(parser)

    return add


def add_to_parser(parser: Any) -> None:
    """Add the DPQ options to a parser, as a separate group."""
    group = parser.add_argument_group("DPQ", "compress embedding tables (turned on by --dpq-K)")
    _add_dataclass(group)
    add_lower_case(group, [f.name for f in flag_fields()])


def add_to_all_tasks() -> None:
    """Give every task that is registered now the DPQ options."""
    from fairseq.tasks import TASK_REGISTRY

    for name in list(TASK_REGISTRY):
        add_to_task(name)


def has_options(cfg: Any) -> bool:
    """Whether a config carries DPQ options at all."""
    return get_option(cfg, KEYS[0]) is not None


def read_options(cfg: Any) -> PluginConfig:
    """The plugin's options in a fairseq config of any type."""
    values: dict[str, Any] = {}
    for field in flag_fields():
        value = get_option(cfg, key_of(field))
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None:
            continue
        if "flag" in field.metadata:
            value = False if value else None  # the flag turns something off
        values[field.name] = value
    return PluginConfig(**values)


def check_options(cfg: Any) -> None:
    """Fail for invalid options before any data is read."""
    options = read_options(cfg)
    if options.enabled:
        for decoder in (False, True):
            options.table_config(decoder).validate(say=say_flag_of(options, decoder))
        return
    changed = [f.name for f in flag_fields() if getattr(options, f.name) != f.default]
    if changed:
        name = changed[0]
        method = METHODS.get(options.method)
        switch = flag("K" if method is None else method.switch)
        raise DPQConfigError(
            f"{say_flag(name, getattr(options, name))} has no effect without {switch}: DPQ is off; "
            f"add {switch} 32, or leave it out"
        )
