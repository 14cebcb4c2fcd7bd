"""The tensors of one table as methods and statistics see them, and what becomes of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, NamedTuple

from torch import Tensor

from fairseq_dpq.training.distances import Stats


@dataclass
class Codebook:
    """Queries, keys, values and all else of one table."""

    tensors: Mapping[str, Tensor]  # parameters and buffers, by name
    tokens: Tensor | None = None  # of the batch, in training
    ramp_left: int = 0  # updates until all rows are quantised

    @property
    def query(self) -> Tensor:
        """(n, D * key size)"""
        return self.tensors["query"]

    @property
    def values(self) -> Tensor:
        """(G, K, d/D)"""
        return self.tensors["values"]

    @property
    def keys(self) -> Tensor:
        """(G, K, key size); the values themselves where a method has no keys."""
        return self.tensors.get("keys", self.values)

    def stats(self, name: str = "norm") -> Stats:
        """Statistics of a batch norm, `norm` for that of the responses: running, or a batch's."""
        return Stats(self.tensors[f"{name}_mean"], self.tensors[f"{name}_var"])


class RegularizerTerm(NamedTuple):
    """The regulariser of one forward pass, as sums over its tokens."""

    total: Tensor  # with weights and gradient
    error: Tensor  # squared quantisation error, a mean over dimensions, for the log
    tokens: int


class TrainOutput(NamedTuple):
    """What a method makes of one batch in training."""

    rows: Tensor  # (tokens, d)
    query: Tensor | None = None  # (tokens, D, key size), without gradient
    codes: Tensor | None = None  # (tokens, D)
    regularizer: RegularizerTerm | None = None
    moments: Mapping[str, Stats] = {}  # of this batch, by the name of the `RunningStatistics`
