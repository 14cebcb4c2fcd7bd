"""Centroids that follow the queries they stand for, by a moving average."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from fairseq_dpq.codebook import Codebook, Step
from fairseq_dpq.codes import sum_by_code
from fairseq_dpq.statistics import Buffers, Shapes, Tracker, WarmUp, count, plus, zeros


class CentroidAverage(Tracker):
    """VQ centroids as the moving average of the queries that they stand for."""

    def __init__(self, groups: int, K: int, size: int, decay: float) -> None:
        self.shape, self.decay = (groups, K, size), decay
        self.clear()

    def buffers(self) -> Shapes:
        return {"ema_count": self.shape[:2], "ema_sum": self.shape}

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        state["ema_count"].fill_(1)
        state["ema_sum"].copy_(book.values)

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
        book.values.copy_(torch.where(hit, moved, book.values.float()))
        return None

    def codes_were_set(self, state: Buffers, book: Codebook, codes: Tensor) -> None:
        state["ema_sum"][codes] = book.values[codes].float()
        state["ema_count"][codes] = 1


class RampAverage(CentroidAverage):
    """SX on its ramp: keys and values follow the queries as VQ centroids do.

    Rows are then mostly plain, so that queries learn fast. The gradient that the share of the
    quantised row leaves to keys and values would not keep up, and codes would go stale.
    """

    def collect(self, step: Step, tokens: Tensor, state: Buffers) -> None:
        if WarmUp.quantized_share(state) < 1:
            super().collect(step, tokens, state)

    def sums(self, state: Buffers, book: Codebook) -> list[Tensor]:
        return super().sums(state, book) if WarmUp.quantized_share(state) < 1 else []

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        if not sums:
            return None
        super().apply(state, book, sums)
        book.keys.copy_(book.values)
        # From now on the optimiser moves them, which must not go back to copies of its own.
        ended = WarmUp.quantized_share(state) == 1
        return torch.ones_like(state["ema_count"], dtype=torch.bool) if ended else None
