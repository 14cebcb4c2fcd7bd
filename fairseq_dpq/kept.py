"""What a layer keeps from one pass to the next: regularisers until they are added to the loss, and
the whole table while it is good."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_dpq.training.codebook import RegularizerTerm
from fairseq_dpq.training.distances import wide_dtype

_UNCOLLECTED = 64  # forward passes whose regulariser may wait


class PendingRegularizers:
    """The regularisers of one table."""

    def __init__(self) -> None:
        # Those of the batch at hand; in evaluation, for a log alone
        self.waiting: deque[RegularizerTerm] = deque(maxlen=_UNCOLLECTED)
        self.uncollected = 0  # forward passes of training since one was collected
        self.collected = self.warned = False

    def add(self, term: RegularizerTerm) -> None:
        """Keep one of training. Nobody collects them if there are too many."""
        self.waiting.append(term)
        self.uncollected += 1
        self.check_collected(_UNCOLLECTED)

    def check_collected(self, most: int = 0) -> None:
        """Warn, once, if more passes than that have waited, or none was ever collected at the end
        of a short training."""
        if self.uncollected > most and not self.warned and (most or not self.collected):
            self.warned = True
            warnings.warn(
                "the regulariser of a DPQEmbedding was not collected for "
                f"{self.uncollected} forward passes: its codes and centroids are not trained. Add "
                "collect_regularizer(model) to the loss of each batch.",
                stacklevel=2,
            )

    def pop(self) -> tuple[Tensor, Tensor] | None:
        """Weighted regulariser and squared error, each a mean over tokens, and forget them."""
        if not self.waiting:
            return None
        totals, errors, counts = zip(*self.waiting)
        self.waiting.clear()
        self.uncollected, self.collected = 0, True
        return torch.stack(totals).sum() / sum(counts), torch.stack(errors).sum() / sum(counts)


def collect_regularizer(module: nn.Module) -> Tensor:
    """The regularisers of all DPQ tables since the last call, summed; add it to the batch loss."""
    kept = [getattr(m, "regularizers", None) for m in module.modules()]
    popped = [pending.pop() for pending in kept if isinstance(pending, PendingRegularizers)]
    terms = [pair[0] for pair in popped if pair is not None]
    if not terms:
        first = next(module.parameters(), None)
        return torch.zeros((), device=None if first is None else first.device)
    return torch.stack(terms).sum()


def _sum_by_place(t: Tensor) -> Tensor:
    """A sum that changes with the numbers of a tensor, and with the order of its rows."""
    rows = torch.atleast_2d(t).flatten(1).sum(1, dtype=wide_dtype(t.device))
    return rows @ torch.linspace(1, 2, len(rows), dtype=rows.dtype, device=t.device)


class Built(NamedTuple):
    """All rows of a table, and their codes where there are any."""

    rows: Tensor  # (n, d)
    codes: Tensor | None = None  # (n, D)


class TableCache:
    """Holds one built table until a tensor that it comes from changes.

    A table with a gradient is also dropped as soon as the gradient has been taken: its graph is
    gone then, and the next micro-batch needs a new one.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Forget the table."""
        self._state: Any = None
        self._built: Built | None = None

    def get(
        self, sources: Iterable[Tensor], build: Callable[[], Built], compare: bool = False
    ) -> Built:
        """The table that was kept for these sources as they are, or a new one. `compare`: by their
        numbers too, because writing to `.data` changes a tensor without a trace."""
        sources = list(sources)
        if any(t.is_inference() for t in sources):  # nothing tells whether they have changed
            return build()
        state: Any = [(t.data_ptr(), t._version) for t in sources]
        if compare and not any(t.is_meta for t in sources):
            state += torch.stack([_sum_by_place(t) for t in sources]).tolist()
        if self._built is None or self._state != state:
            self._state, self._built = state, build()
            if self._built.rows.requires_grad:
                self._built.rows.register_hook(lambda _: self.drop())
        return self._built

    def __getstate__(self) -> dict[str, Any]:
        # Neither copied nor pickled: tensors with a graph could not be.
        return {"_state": None, "_built": None}
