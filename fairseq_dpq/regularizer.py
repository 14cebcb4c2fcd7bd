"""Regularisers of forward passes, kept until the caller adds them to the loss."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from fairseq_dpq.training.codebook import RegularizerTerm

_UNCOLLECTED = 64  # forward passes whose regulariser may wait
_NOTED = 8  # evaluation batches whose regulariser may wait for a log


class PendingRegularizers:
    """The regularisers of one table."""

    def __init__(self) -> None:
        self.waiting: list[RegularizerTerm] = []
        self.uncollected = 0  # forward passes of training since one was collected
        self.collected = self.warned = False

    def add(self, term: RegularizerTerm) -> None:
        """Keep one of training. Nobody collects them if there are too many."""
        self.uncollected += 1
        if self.uncollected > _UNCOLLECTED:
            self._warn()
        if len(self.waiting) >= _UNCOLLECTED:
            self.waiting.clear()
        self.waiting.append(term)

    def check_collected(self) -> None:
        """Warn if the table was trained and nobody ever asked for its regulariser."""
        if self.uncollected and not self.collected:
            self._warn()

    def _warn(self) -> None:
        if not self.warned:
            warnings.warn(
                "the regulariser of a DPQEmbedding was not collected for "
                f"{self.uncollected} forward passes: its codes and centroids are not trained. Add "
                "collect_regularizer(model) to the loss of each batch.",
                stacklevel=2,
            )
            self.warned = True

    def drop(self) -> None:
        """Forget what a batch has left: it is not the next one's."""
        self.waiting = []

    def note(self, term: RegularizerTerm) -> None:
        """Keep one of evaluation for a log; it enters no loss."""
        self.waiting = [*self.waiting[1 - _NOTED :], term]

    def pop(self) -> tuple[Tensor, Tensor] | None:
        """Weighted regulariser and squared error, each a mean over tokens, and forget them."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return None
        self.uncollected, self.collected = 0, True
        totals, errors, counts = zip(*waiting)
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
