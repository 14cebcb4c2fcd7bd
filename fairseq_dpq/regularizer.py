"""Regularisers of forward passes, kept until the caller adds them to the loss."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from fairseq_dpq.codebook import Penalty

_UNCOLLECTED = 64  # forward passes whose regulariser may wait
_NOTED = 8  # evaluation batches whose regulariser may wait for a log


class Penalties:
    """The regularisers of one table."""

    def __init__(self) -> None:
        self.waiting: list[Penalty] = []
        self.warned = False

    def add(self, penalty: Penalty) -> None:
        """Keep one of training. Nobody collects them if there are too many."""
        if len(self.waiting) >= _UNCOLLECTED:
            if not self.warned:
                warnings.warn(
                    "the VQ regulariser of a DPQEmbedding was not collected for "
                    f"{_UNCOLLECTED} forward passes: its centroids are not trained. Add "
                    "collect_regularizer(model) to the loss of each batch.",
                    stacklevel=5,
                )
                self.warned = True
            self.waiting.clear()
        self.waiting.append(penalty)

    def note(self, penalty: Penalty) -> None:
        """Keep one of evaluation for a log; it enters no loss."""
        self.waiting = [*self.waiting[1 - _NOTED :], penalty]

    def pop(self) -> tuple[Tensor, Tensor] | None:
        """Weighted regulariser and squared error, each a mean over tokens, and forget them."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return None
        totals, errors, counts = zip(*waiting)
        return torch.stack(totals).sum() / sum(counts), torch.stack(errors).sum() / sum(counts)


def collect_regularizer(module: nn.Module) -> Tensor:
    """The regularisers of all DPQ tables since the last call, summed; add it to the batch loss."""
    kept = [getattr(m, "penalties", None) for m in module.modules()]
    popped = [penalties.pop() for penalties in kept if isinstance(penalties, Penalties)]
    terms = [pair[0] for pair in popped if pair is not None]
    if not terms:
        first = next(module.parameters(), None)
        return torch.zeros((), device=None if first is None else first.device)
    return torch.stack(terms).sum()
