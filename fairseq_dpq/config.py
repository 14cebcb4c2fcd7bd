"""The DPQ options: the only home of their names, defaults, help texts and validation.

`DPQConfig` holds what the layer takes; `PluginConfig` adds what only fairseq needs.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Callable

METHODS = ("sx", "vq")
DISTANCES = ("dot", "euclidean", "cosine")
MAX_K = 1 << 15  # a code is held in at most two bytes, as int16


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
    D: int = _option(16, "number of groups; divides the embedding size")
    method: str = _option(
        "sx",
        "sx: softmax-based, separate keys and values; vq: centroid-based, keys are the values",
        choices=METHODS,
    )
    distance: str | None = _option(
        None,
        "how a query is compared with the keys (default: dot for sx; vq takes euclidean only)",
        choices=DISTANCES,
    )
    tau: float = _option(1.0, "temperature of the softmax that gives sx its gradient")
    share_subspaces: bool = _option(
        False, "all groups share one set of keys and values (smaller still)"
    )
    key_dim: int | None = _option(
        None, "size of a query or key in each group, sx only (default: embedding size / D)"
    )
    normalize: bool = _option(
        True,
        "do not batch-normalise the distances before the codes are chosen",
        flag="no-normalize",
    )
    reg_weight: float = _option(1.0, "weight of the vq regulariser, which moves the centroids")
    commitment: float = _option(
        0.0, "weight of the vq commitment term, which draws queries to their centroids"
    )
    ema_decay: float = _option(
        0.0,
        "move vq centroids by an exponential moving average with this decay instead of the "
        "regulariser's gradient, e.g. 0.99 (0: off)",
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
    sparse: bool = _option(
        False,
        "sparse gradient of the query matrix, as nn.Embedding(sparse=True) has it; no flag, for "
        "fairseq's trainer and optimisers take dense gradients only",
        no_flag=True,
    )

    def resolved_distance(self) -> str:
        """The distance in force: `distance`, or the method's default."""
        return self.distance or ("dot" if self.method == "sx" else "euclidean")

    def resolved_key_dim(self, embedding_dim: int) -> int:
        """The size of a query and a key in each group."""
        return self.key_dim or embedding_dim // self.D

    def value_rows(self) -> int:
        """Rows of the value matrix: K, or K for each group when they are not shared."""
        return self.K if self.share_subspaces else self.K * self.D

    def compact_bits(self, num_embeddings: int, embedding_dim: int) -> int:
        """Bits of the inference form by the paper's formula: codes and 32-bit values."""
        codes = num_embeddings * self.D * code_bits(self.K)
        return codes + 32 * self.value_rows() * (embedding_dim // self.D)

    def compression_ratio(self, num_embeddings: int, embedding_dim: int) -> float:
        """Bits of the full 32-bit table over bits of the inference form."""
        full = 32 * num_embeddings * embedding_dim
        return full / self.compact_bits(num_embeddings, embedding_dim)

    def layer_options(self) -> dict[str, Any]:
        """The keyword arguments of `DPQEmbedding`."""
        names = [f.name for f in fields(DPQConfig)]
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
        need(
            self.distance is None or self.distance in DISTANCES,
            "distance",
            f"choose one of {', '.join(DISTANCES)}",
        )
        need(_is_int(self.K) and 2 <= self.K <= MAX_K, "K", f"must be from 2 to {MAX_K}; try 32")
        need(_is_int(self.D) and self.D >= 1, "D", "must be 1 or more; try 16")
        need(self.tau > 0, "tau", "must be above 0; try 1.0")
        need(self.reg_weight >= 0, "reg_weight", "must not be negative; try 1.0")
        need(self.commitment >= 0, "commitment", "must not be negative; try 0.25")
        need(0 <= self.ema_decay < 1, "ema_decay", "must be in [0, 1); try 0.99, or 0 for off")
        need(self.kmeans_init >= 0, "kmeans_init", "must be 0 (off) or a number of updates")
        need(self.reseed_after >= 0, "reseed_after", "must be 0 (off) or a number of updates")
        need(
            self.key_dim is None or (_is_int(self.key_dim) and self.key_dim >= 1),
            "key_dim",
            "must be 1 or more, or left out",
        )
        vq = self.method == "vq"
        need(
            not vq or self.resolved_distance() == "euclidean",
            "distance",
            "vq compares by euclidean distance only; leave it out, or use " + say("method", "sx"),
        )
        need(
            vq or not self.ema_decay,
            "ema_decay",
            "only vq has centroids to average; use " + say("method", "vq"),
        )
        need(
            vq or not self.commitment,
            "commitment",
            "only vq has a commitment term; use " + say("method", "vq"),
        )
        need(
            vq or not self.rotation_trick,
            "rotation_trick",
            "only vq passes gradients straight through; use " + say("method", "vq"),
        )
        if embedding_dim is None:
            return
        if embedding_dim < 1 or embedding_dim % self.D:
            near = sorted(_divisors(embedding_dim), key=lambda x: (abs(math.log(x / self.D)), x))
            tries = " or ".join(str(x) for x in sorted(near[:2])) if near else "a positive size"
            raise DPQConfigError(
                f"{say('D', self.D)} does not divide {_dim(dim_name, embedding_dim)}; try {tries}"
            )
        need(
            not vq or self.key_dim in (None, embedding_dim // self.D),
            "key_dim",
            f"the keys of vq are its values, of size {embedding_dim // self.D} "
            f"({_dim(dim_name, embedding_dim)} / D); leave it out, or use " + say("method", "sx"),
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

    @property
    def enabled(self) -> bool:
        """Whether any table is to be replaced."""
        return self.K != 0

    def table_config(self, decoder: bool) -> DPQConfig:
        """The layer's options for one table; the decoder may have its own K and D."""
        config = DPQConfig(**self.layer_options())
        if decoder:
            config = replace(config, K=self.decoder_K or config.K, D=self.decoder_D or config.D)
        return config


def flag_fields() -> list[Field]:
    """The fields of PluginConfig that are flags on the command line."""
    return [f for f in fields(PluginConfig) if not f.metadata.get("no_flag")]


def code_bits(K: int) -> int:
    """Bits that a code out of K needs: ceil(log2 K)."""
    return (K - 1).bit_length()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divisors(number: int) -> list[int]:
    return [x for x in range(1, number + 1) if number % x == 0]


def _dim(name: str, value: int) -> str:
    return f"{name} {value}" if name.startswith("-") else f"{name}={value}"
