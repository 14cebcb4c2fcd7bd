"""Centroids that follow the queries they stand for, by a moving average."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from fairseq_dpq.codebook import Codebook, Step
from fairseq_dpq.codes import sum_by_code
from fairseq_dpq.statistics import Buffers, Shapes, Tracker, count, plus, zeros


class CentroidAverage(Tracker):
    """Keys as the moving average of the queries that they stand for; those of VQ are its values."""

    def __init__(self, groups: int, K: int, size: int, decay: float) -> None:
        self.shape, self.decay = (groups, K, size), decay
        self.clear()

    def buffers(self) -> Shapes:
        return {"ema_count": self.shape[:2], "ema_sum": self.shape}

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        state["ema_count"].fill_(1)
        state["ema_sum"].copy_(book.keys)

    def clear(self) -> None:
        self.used: Tensor | None = None  # (G, K) tokens of each code
        self.total: Tensor | None = None  # (G, K, size) their queries

    def collect(self, step: Step, tokens: Tensor, state: Buffers) -> None:
        assert step.query is not None and step.codes is not None
        G, K, _ = self.shape
        self.used = plus(self.used, count(step.codes, G, K))
        self.total = plus(self.total, sum_by_code(step.query, step.codes, G, K).double())

    def sums(self, state: Buffers, book: Codebook) -> list[Tensor]:
        used = zeros(book, *self.shape[:2]) if self.used is None else self.used
        return [used, zeros(book, *self.shape) if self.total is None else self.total]

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        used, total = (part.float() for part in sums)
        state["ema_count"].mul_(self.decay).add_(used, alpha=1 - self.decay)
        state["ema_sum"].mul_(self.decay).add_(total, alpha=1 - self.decay)
        moved = state["ema_sum"] / state["ema_count"].clamp_min(1e-12).unsqueeze(-1)
        hit = (used > 0).unsqueeze(-1)
        book.keys.copy_(torch.where(hit, moved, book.keys.float()))
        return None

    def codes_were_set(self, state: Buffers, book: Codebook, codes: Tensor) -> None:
        state["ema_sum"][codes] = book.keys[codes].float()
        state["ema_count"][codes] = 1


class KeyAverage(CentroidAverage):
    """SX after a warm-up: keys follow the queries as VQ centroids do, and so do values along the
    ramp, after which they learn by their own gradient.

    On the ramp, rows are mostly plain, so that queries learn fast; the gradient that the share of
    the quantised row leaves to the values would not keep up. Keys that an optimiser moves change
    the codes of many words at once, at a constant rate all through the training.
    """

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        super().apply(state, book, sums)
        now, _, last = state["schedule"].tolist()
        if now <= last:
            book.values.copy_(book.keys)
        # From now on the optimiser moves the values, and must not go back to copies of its own.
        ended = now == last
        return torch.ones_like(state["ema_count"], dtype=torch.bool) if ended else None
