"""The DPQ options: the only home of their names, defaults, help texts and validation.

`DPQConfig` holds what the layer takes; `PluginConfig` adds what only fairseq needs.
"""

from __future__ import annotations

import argparse
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Callable

from fairseq_dpq.distances import DISTANCES
from fairseq_dpq.methods import METHODS, Method
from fairseq_dpq.sizes import MAX_K, default_D, division_problem


class DPQConfigError(ValueError):
    """An option, or a combination of options, that cannot work."""


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


def _say(name: str, value: Any) -> str:
    """How an option is named in an error of the layer: `D=48`."""
    return f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}"


@dataclass
class DPQConfig:
    """Options of one DPQ table, as `DPQEmbedding` takes them."""

    K: int = _option(32, "number of codes in each group")
    D: int | None = _option(
        None,
        "number of groups; divides the embedding size (default: 16, or the divisor of the "
        "embedding size nearest to it)",
    )
    method: str = _option(
        "sx",
        "sx: softmax-based, separate keys and values; vq: centroid-based, keys are the values; "
        "low_rank: no codes, a narrow table times a matrix (--dpq-rank); random_codes: codes drawn "
        "once and kept, values trained; kd_codes: free logits, mean of code vectors, linear map "
        "(Chen et al., 2018); fixed_codes: that with the codes of a file (Shu and Nakayama, 2018)",
        choices=tuple(METHODS),
    )
    distance: str | None = _option(
        None,
        "how a query is compared with the keys (default: dot for sx, euclidean after a warm-up; vq "
        "takes euclidean only)",
        choices=tuple(DISTANCES),
    )
    tau: float | None = _option(
        None,
        "temperature of the softmax that gives sx its gradient; after a warm-up, in units of the "
        "keys' mean squared distance from their middle (default: 0.05 then, else 1.0; 0.25 with a "
        "warm-up and normalised distances)",
    )
    share_subspaces: bool = _option(
        False, "all groups share one set of keys and values (smaller still)"
    )
    key_dim: int | None = _option(
        None, "size of a query or key in each group, sx only (default: embedding size / D)"
    )
    normalize: bool | None = _option(
        None,
        "do not normalise the distances before the codes are chosen (default: sx without a warm-up "
        "normalises, vq does not)",
        flag="no-normalize",
    )
    batch_stats: bool = _option(
        False,
        "normalise by each batch's own statistics in training, as the paper does, instead of the "
        "running ones",
    )
    reg_weight: float | None = _option(
        None,
        "weight of the vq regulariser, which then moves the centroids instead of an average "
        "(default: 1.0 with --dpq-ema-decay 0)",
    )
    commitment: float | None = _option(
        None,
        "weight of the vq commitment term, which draws queries to their centroids (default: 0.5)",
    )
    ema_decay: float | None = _option(
        None,
        "move vq centroids by an exponential moving average with this decay, 0: by the "
        "regulariser's gradient (default: 0.99, or 0 with --dpq-reg-weight)",
    )
    warmup_updates: int | None = _option(
        None,
        "first updates in which the table is a plain one; k-means of it then gives the codes, 0: "
        "off (default: an eighth of the training, a quarter if tied)",
    )
    ramp_updates: int | None = _option(
        None,
        "updates after the warm-up over which quantised rows take the place of plain ones "
        "(default: half of the training)",
    )
    kmeans_init: int = _option(
        0, "collect the tokens of this many first updates, then start the keys by k-means (0: off)"
    )
    reseed_after: int = _option(
        0, "re-seed a code that no token has used for this many updates (0: off)"
    )
    rotation_trick: bool = _option(
        False, "vq: pass the gradient through the rotation from query to centroid"
    )
    rank: int = _option(0, "low_rank: columns of the narrow table; gives the ratio d / rank")
    code_width: int = _option(
        0,
        "kd_codes, fixed_codes: size of a code vector, which a linear map takes to the embedding "
        "size (0: the embedding size, no map)",
    )
    codes: str | None = _option(
        None, "fixed_codes: file of fairseq-dpq-export that has the codes of the table"
    )
    distill_from: str | None = _option(
        None, "kd_codes: full checkpoint whose table the embeddings are drawn to"
    )
    distill_weight: float = _option(
        1000.0, "kd_codes: weight of the squared distance from the table of --dpq-distill-from"
    )
    sparse: bool = _option(
        False,
        "sparse gradient of the query matrix, as nn.Embedding(sparse=True) has it; no flag, "
        "because fairseq's trainer and optimisers only take dense gradients",
        no_flag=True,
    )

    @property
    def method_object(self) -> Method:
        """The method that `method` names."""
        return METHODS[self.method]

    def resolved(
        self, tied: bool = False, max_update: int = 0, embedding_dim: int | None = None
    ) -> DPQConfig:
        """The options with a value for each that was left open, as the method has it.

        `tied` if an output layer uses the table too; `max_update` is the length of the training,
        0 if it is not known. D needs the `embedding_dim`.
        """
        own = self.method_object.defaults(self, tied, max_update)
        config = replace(self, **{k: v for k, v in own.items() if getattr(self, k) is None})
        return config if embedding_dim is None else config.with_D(embedding_dim)

    def with_D(self, embedding_dim: int) -> DPQConfig:
        """With a D that divides the embedding size, where the user gave none and codes need one."""
        if self.D is not None or not self.method_object.has_codes:
            return self
        return replace(self, D=default_D(embedding_dim))

    def compact_bits(self, num_embeddings: int, embedding_dim: int) -> int:
        """Bits of the inference form by the paper's formula: codes and 32-bit values."""
        config = self.with_D(embedding_dim)
        return self.method_object.bits(config, num_embeddings, embedding_dim)

    def compression_ratio(self, num_embeddings: int, embedding_dim: int) -> float:
        """Bits of the full 32-bit table over bits of the inference form."""
        full = 32 * num_embeddings * embedding_dim
        return full / self.compact_bits(num_embeddings, embedding_dim)

    def describe(self) -> str:
        """Method and size in a few words, for logs and tables."""
        return self.method_object.describe(self)

    def layer_options(self) -> dict[str, Any]:
        """The keyword arguments of `DPQEmbedding`. A D that is not set is left out: version 0.2.0
        reads no null in its place."""
        names = [f.name for f in fields(DPQConfig) if f.name != "D" or self.D is not None]
        return {name: getattr(self, name) for name in names}

    def validate(
        self,
        embedding_dim: int | None = None,
        say: Callable[[str, Any], str] = _say,
        dim_name: str = "embedding_dim",
    ) -> None:
        """Raise `DPQConfigError` for what cannot work; `say` words an option for the reader."""

        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise DPQConfigError(f"{say(name, getattr(self, name))}: {what}")

        need(self.method in METHODS, "method", f"choose one of {', '.join(METHODS)}")
        method = self.method_object
        self._refuse_foreign(method, say)
        config = self if embedding_dim is None else self.with_D(embedding_dim)
        if "K" in method.options:
            _check_codes(self, need)
            if embedding_dim is not None and config.D is not None and method.splits_rows:
                problem = division_problem(config.D, embedding_dim)
                if problem:
                    dim = _dim(dim_name, embedding_dim)
                    raise DPQConfigError(f"{say('D', config.D)} does not divide {dim}; {problem}")
        method.validate(config, embedding_dim, need, say)

    def _refuse_foreign(self, method: Method, say: Callable[[str, Any], str]) -> None:
        """An option that the method does not take would have no effect."""
        taken = {name for m in METHODS.values() for name in m.options}
        for f in fields(DPQConfig):
            value = getattr(self, f.name)
            if f.name in method.options or f.name not in taken or value == f.default:
                continue
            if f.name == "K":  # a default of the layer, a switch of the plugin
                continue
            owners = [m.name for m in METHODS.values() if f.name in m.options]
            raise DPQConfigError(
                f"{say(f.name, value)} has no effect with {say('method', method.name)}; use "
                + " or ".join(say("method", owner) for owner in owners)
            )


def _check_codes(c: DPQConfig, need: Callable[[bool, str, str], None]) -> None:
    """What holds for every method with codes."""
    need(
        c.distance is None or c.distance in DISTANCES,
        "distance",
        f"choose one of {', '.join(DISTANCES)}",
    )
    need(_is_int(c.K) and 2 <= c.K <= MAX_K, "K", f"must be from 2 to {MAX_K}; try 32")
    need(c.D is None or (_is_int(c.D) and c.D >= 1), "D", "must be 1 or more; try 16")
    need(c.kmeans_init >= 0, "kmeans_init", "must be 0 (off) or a number of updates")
    need(c.reseed_after >= 0, "reseed_after", "must be 0 (off) or a number of updates")
    for name in ("warmup_updates", "ramp_updates"):
        value = getattr(c, name)
        need(value is None or value >= 0, name, "must be 0 (off) or a number of updates")
    need(
        not (c.warmup_updates and c.kmeans_init),
        "kmeans_init",
        "a warm-up ends with k-means of its own; leave one of the two out",
    )
    need(
        not c.batch_stats or c.normalize is not False,
        "batch_stats",
        "there is nothing to normalise by without normalisation; leave one of the two out",
    )
    need(
        c.key_dim is None or (_is_int(c.key_dim) and c.key_dim >= 1),
        "key_dim",
        "must be 1 or more, or left out",
    )


@dataclass
class PluginConfig(DPQConfig):
    """Options of the fairseq plugin: the layer's, off by default, and which tables to replace."""

    K: int = _option(0, "number of codes in each group; 0: stock embeddings, DPQ off")
    embeddings: str = _option(
        "input",
        "which tables become DPQ: input (the encoder's; the decoder's where there is no encoder), "
        "decoder, all, or module paths separated by commas, e.g. decoder.embed_tokens",
    )
    decoder_K: int = _option(0, "K of the decoder's table (0: as --dpq-K)")
    decoder_D: int = _option(0, "D of the decoder's table (0: as --dpq-D)")
    log_interval: int = _option(
        1000, "log the use of codes every so many updates, and with each validation (0: only then)"
    )

    @property
    def enabled(self) -> bool:
        """Whether any table is to be replaced."""
        method = METHODS.get(self.method)
        return self.K != 0 or (method is not None and bool(getattr(self, method.switch)))

    def to_keys(self) -> dict[str, Any]:
        """The options as flat config keys, as a checkpoint keeps them."""
        own = {f.name: getattr(self, f.name) for f in flag_fields()}
        return {
            key_of(f): own[f.name] is False if "flag" in f.metadata else own[f.name]
            for f in flag_fields()
        }

    def table_config(self, decoder: bool) -> DPQConfig:
        """The layer's options for one table; the decoder may have its own K and D."""
        config = DPQConfig(**self.layer_options())
        if decoder:
            config = replace(config, K=self.decoder_K or config.K, D=self.decoder_D or config.D)
        return config


def flag_fields() -> list[Field]:
    """The fields of PluginConfig that are flags on the command line."""
    return [f for f in fields(PluginConfig) if not f.metadata.get("no_flag")]


def key_of(f: Field) -> str:
    """The config key of an option: `dpq_K`; `dpq_no_normalize` for what is on by default."""
    return "dpq_" + f.metadata.get("flag", f.name).replace("-", "_")


def flag(name: str) -> str:
    """The command-line flag of an option: `--dpq-K`."""
    f = next(f for f in flag_fields() if f.name == name)
    return "--" + key_of(f).replace("_", "-")


def flag_type(f: Field) -> type:
    """The type of an option's value: int, float, str or bool."""
    return {"int": int, "float": float, "bool": bool, "str": str}[str(f.type).split(" ")[0]]


def flag_default(f: Field) -> Any:
    """The default of the flag: inverted for what is on by default."""
    return False if "flag" in f.metadata else f.default


def flag_help(f: Field) -> str:
    """The help text of the flag, with its default."""
    text = f.metadata["help"]
    default = flag_default(f)
    if default not in (None, False, 0, "") and "default" not in text:
        text += f" (default: {default})"
    return text.replace("%", "%%")


def add_flags(parser: Any, names: list[str], *also: str, **defaults: Any) -> None:
    """Add the flags of some options to an argparse parser or group.

    `also` are other names of the flag; `defaults` replaces those of PluginConfig.
    """
    for f in flag_fields():
        if f.name not in names:
            continue
        how: dict[str, Any] = {"dest": f.name, "help": flag_help(f)}
        if flag_type(f) is bool:
            how["action"] = "store_false" if "flag" in f.metadata else "store_true"
        else:
            how.update(type=flag_type(f), choices=f.metadata.get("choices"))
        parser.add_argument(*also, flag(f.name), default=defaults.get(f.name, f.default), **how)
    add_lower_case(parser, names)


class _Meant(argparse.Action):
    """A flag in the wrong case: an error that names the right one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        raise argparse.ArgumentError(self, f"did you mean {self.const}?")


def add_lower_case(parser: Any, names: list[str]) -> None:
    """Let `--dpq-k` name `--dpq-K`: argparse would take it for an ambiguous prefix of others."""
    for f in flag_fields():
        name = flag(f.name)
        if f.name in names and name != name.lower():
            how: Any = {"nargs": "?", "const": name, "action": _Meant}
            parser.add_argument(name.lower(), dest=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)


def say_flag(name: str, value: Any) -> str:
    """How an option is named in an error of a command: `--dpq-D 48`."""
    return flag(name) if isinstance(value, bool) else f"{flag(name)} {value}"


def say_flag_of(options: PluginConfig, decoder: bool) -> Callable[[str, Any], str]:
    """`say_flag` for the options of one table: the decoder's K and D may have their own flags."""

    def say(name: str, value: Any) -> str:
        if decoder and name in ("K", "D") and getattr(options, f"decoder_{name}"):
            name = f"decoder_{name}"
        return say_flag(name, value)

    return say


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dim(name: str, value: int) -> str:
    return f"{name} {value}" if name.startswith("-") else f"{name}={value}"
