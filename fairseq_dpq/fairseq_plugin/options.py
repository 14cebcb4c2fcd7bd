"""`--dpq-*` on the command line: the options of all methods, and those of the plugin itself.

fairseq builds its parser from task dataclasses after `--user-dir` is imported; a task without one
gets the same options through its `add_args`. fairseq is imported inside the functions, because
importing it may register the plugin while this module is still being imported.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from dataclasses import Field, dataclass, field
from typing import Any, Callable, Optional, Sequence

from fairseq_dpq.config import (
    DPQConfigError,
    Format,
    add_lower_case,
    flag,
    flag_help,
    format_flag,
    key,
    option,
    option_type,
)
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.fairseq_plugin.patching import around
from fairseq_dpq.methods import DEFAULT_METHOD, METHODS, MethodOptions, make_options
from fairseq_dpq.methods.base import all_options, takers
from fairseq_dpq.model import EmbeddingTable


@dataclass
class PluginOptions:
    """What only the plugin needs, and what was given of the methods' options."""

    method: str = option(DEFAULT_METHOD, "how tables are learned")
    embeddings: str = option(
        "input",
        "which tables become DPQ: input (the encoder's; the decoder's where there is no encoder), "
        "decoder, all, or module paths separated by commas, e.g. decoder.embed_tokens",
    )
    decoder_K: int = option(0, "K of the decoder's table (0: as --dpq-K)")
    decoder_D: int = option(0, "D of the decoder's table (0: as --dpq-D)")
    log_interval: int = option(
        1000, "log the use of codes every so many updates, and with each validation (0: only then)"
    )
    full_start: float = option(
        1.0,
        "with DPQ off: factor of the initial weights of the tables of --dpq-embeddings, so "
        "that a full table starts as small as a DPQ one",
    )
    given: dict[str, Any] = field(default_factory=dict)  # of the methods: what is not the default

    @property
    def switch(self) -> str:
        """The option that turns DPQ on with this method."""
        return METHODS[self.method].switch if self.method in METHODS else "K"

    @property
    def enabled(self) -> bool:
        """Whether any table is to be replaced."""
        return bool(self.given.get("K") or self.given.get(self.switch))

    def changed(self) -> dict[str, Any]:
        """The plugin's own options that are not the default."""
        own = {f.name: (getattr(self, f.name), f.default) for f in plugin_fields()}
        return {name: value for name, (value, default) in own.items() if value != default}

    def to_keys(self) -> dict[str, Any]:
        """The options as flat config keys, as a checkpoint keeps them."""
        given = {**self.given, **self.changed()}
        return {key(f.name): given.get(f.name, f.default) for f in flag_fields()}

    def of_table(self, decoder: bool) -> MethodOptions:
        """The method's options for one table; the decoder may have its own K and D."""
        given = dict(self.given)
        if decoder:
            own = {"K": self.decoder_K, "D": self.decoder_D}
            given.update({name: value for name, value in own.items() if value})
        return make_options(self.method, given, self.format(decoder))

    def format(self, decoder: bool) -> Format:
        """How errors name the options of one table: the decoder's K and D have their own flags."""

        def named(name: str, value: Any) -> str:
            own = f"decoder_{name}"
            return format_flag(own if decoder and getattr(self, own, False) else name, value)

        return named


# Fields and flags ---------------------------------------------------------------------------------


def plugin_fields() -> list[Field]:
    """The plugin's own options; the methods that are installed are the choices of `method`."""
    method, *others = (f for f in dataclasses.fields(PluginOptions) if f.name != "given")
    texts = "; ".join(f"{name}: {method.summary}" for name, method in METHODS.items())
    method = copy.copy(method)
    method.metadata = {**method.metadata, "choices": tuple(METHODS), "help": texts}  # type: ignore
    return [method, *others]


def method_fields() -> list[Field]:
    """The options of all methods that are flags."""
    return [f for f in all_options().values() if f.metadata["flag"]]


def flag_fields() -> list[Field]:
    """All options that are flags."""
    return [*method_fields(), *plugin_fields()]


def option_help(f: Field) -> str:
    """The help of a flag, with the methods that take it, unless all do that have codes."""
    owners = takers(f.name)
    few = owners and any(m.has_codes and m.name not in owners for m in METHODS.values())
    text = f"{', '.join(owners)}: {flag_help(f)}" if few else flag_help(f)
    return text + "; as a flag it turns DPQ on" if f.name == "K" else text


@functools.lru_cache(maxsize=None)
def _fairseq_fields() -> list[tuple[str, Any, Any]]:
    """The options as fields of a fairseq dataclass."""
    from fairseq.dataclass import ChoiceEnum

    out = []
    for f in flag_fields():
        choices = f.metadata["choices"]
        kind: Any = option_type(f) if choices is None else ChoiceEnum(choices)
        if f.default is None:
            kind = Optional[kind]
        metadata = {"help": f"DPQ: {option_help(f)}"}
        out.append((key(f.name), kind, dataclasses.field(default=f.default, metadata=metadata)))
    return out


def _with_options(base: Any) -> Any:
    """A fairseq dataclass that has the DPQ options too."""
    return dataclasses.make_dataclass(base.__name__, _fairseq_fields(), bases=(base,))


def add_to_task(name: str) -> None:
    """Give one registered task the DPQ options, once."""
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
    from hydra.core.config_store import ConfigStore

    task, dataclass = TASK_REGISTRY[name], TASK_DATACLASS_REGISTRY.get(name)
    if dataclass is None:
        around(task, "add_args", _add_args)
        return
    if key("K") in dataclass.__dataclass_fields__:
        return
    dataclass = _with_options(dataclass)
    setattr(task, "__dataclass", dataclass)
    TASK_DATACLASS_REGISTRY[name] = dataclass
    node = dataclass()
    node._name = name
    ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")


def _add_flags(parser: Any) -> None:
    from fairseq.dataclass import FairseqDataclass
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    gen_parser_from_dataclass(parser, _with_options(FairseqDataclass)())


def _add_args(old: Callable, parser: Any) -> None:
    old(parser)
    _add_flags(parser)


def add_to_parser(parser: Any) -> None:
    """Add the DPQ options to a parser, as a separate group."""
    group = parser.add_argument_group("DPQ", "compress embedding tables (turned on by --dpq-K)")
    _add_flags(group)
    for f in flag_fields():
        add_lower_case(group, f.name)


def add_to_all_tasks() -> None:
    """Give every task that is registered now the DPQ options."""
    from fairseq.tasks import TASK_REGISTRY

    for name in list(TASK_REGISTRY):
        add_to_task(name)


# Reading ------------------------------------------------------------------------------------------


def config_keys() -> list[str]:
    """All keys of DPQ options in a config."""
    return [key(f.name) for f in flag_fields()]


def has_options(cfg: Any) -> bool:
    """Whether a config carries DPQ options at all."""
    return get_option(cfg, key("method")) is not None


def read_options(cfg: Any) -> PluginOptions:
    """The plugin's options in a fairseq config of any type."""
    return make_plugin_options({f.name: get_option(cfg, key(f.name)) for f in flag_fields()})


def make_plugin_options(values: dict[str, Any]) -> PluginOptions:
    """From the values of all flags, by name."""
    given = {}
    for f in flag_fields():
        value = values.get(f.name)
        value = value.value if isinstance(value, enum.Enum) else value
        if value is not None and value != f.default and (f.name != "K" or value):  # 0 is off
            given[f.name] = value
    own = {f.name: given.pop(f.name) for f in plugin_fields() if f.name in given}
    return PluginOptions(**own, given=given)


def check_options(cfg: Any) -> None:
    """Fail for invalid options before any data is read."""
    options = read_options(cfg)
    factor = format_flag("full_start", options.full_start)
    if not options.full_start > 0:
        raise DPQConfigError(f"{factor}: must be above 0; try 0.5")
    if options.enabled:
        if options.full_start != 1:
            raise DPQConfigError(f"{factor} is for full tables; leave it or {flag('K')} out")
        for decoder in (False, True):
            options.of_table(decoder).validate(format=options.format(decoder))
        return
    full = {"full_start", "embeddings"} if options.full_start != 1 else set()
    switch = flag(options.switch)
    for name, value in {**options.changed(), **options.given}.items():
        if name not in full:
            raise DPQConfigError(
                f"{format_flag(name, value)} has no effect without {switch}: DPQ is off; "
                f"add {switch} 32, or leave it out"
            )


# Which tables -------------------------------------------------------------------------------------

# Output layers by the last part of their path, and how each is tied to its token table.
TIED_BY = {
    "output_projection": "--share-decoder-input-output-embed",
    "fc_out": "--share-decoder-input-output-embed",
    "fc3": "--share-input-output-embed",
    "lm_head": "--untie-weights-roberta left out",
    "embed_out": "--share-encoder-input-output-embed",
}


def in_decoder(path: str) -> bool:
    """Whether a path is in a decoder: `decoder.embed_tokens`, `decoders.de.embed_tokens`."""
    return any(part.startswith("decoder") for part in path.split("."))


def decoder_only(paths: Sequence[str]) -> bool:
    """Whether a table belongs to decoders only, and not also to an encoder."""
    return all(in_decoder(path) for path in paths)


def choose(tables: Sequence[EmbeddingTable], wanted: str) -> list[EmbeddingTable]:
    """The tables that `--dpq-embeddings WANTED` selects."""
    by_path = {path: found for found in tables for path in found.paths}
    words = [word.strip() for word in wanted.split(",")]
    chosen = words
    if words == ["all"]:
        chosen = list(by_path)
    elif words == ["input"]:
        chosen = [p for p, f in by_path.items() if not decoder_only(f.paths)] or list(by_path)
    elif words == ["decoder"]:
        chosen = [p for p in by_path if in_decoder(p)]
    missing = [path for path in chosen or words if path not in by_path]
    if missing:
        raise DPQConfigError(
            f"{flag('embeddings')} {wanted}: no token table at {missing[0]!r}; it has "
            f"{', '.join(by_path) or 'none (embed_tokens)'}. Choose input, decoder, all, or paths"
        )
    return list({by_path[path].path: by_path[path] for path in chosen}.values())
