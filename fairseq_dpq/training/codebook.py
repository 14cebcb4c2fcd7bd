"""The tensors that one table's codes come from, as methods and statistics get to see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, NamedTuple

from torch import Tensor

from fairseq_dpq.training.distances import Stats


@dataclass
class Codebook:
    """Queries, keys, values and running statistics of one table."""

    query: Tensor  # (n, D * key size)
    keys: Tensor  # (G, K, key size); the values themselves where a method has no keys
    values: Tensor  # (G, K, d/D)
    stats: Stats | None = None  # of the responses, where they are normalised: running, or a batch's
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # all of the table, by name
    tokens: Tensor | None = None  # of the batch, in training
    ramp_left: int = 0  # updates until all rows are quantised

    def one_number(self) -> Tensor:
        """A number that keys and values take part in, also where rows are plain."""
        return self.keys.flatten()[0].float() + self.values.flatten()[0].float()


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
