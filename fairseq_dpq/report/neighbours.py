"""Nearest neighbours by cosine in a table of any form, without holding the dense table."""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy
import torch
from torch import Tensor

_ROWS = 1 << 13  # rows compared at once
_QUERIES = 1 << 9
_DIGITS = 6  # equal rows may differ by rounding: beyond this many digits the lower id is first

Rows = Callable[[Tensor], Tensor]


def steps(n: int, wanted: int) -> int:
    """Rows that `nearest` compares, and reports to its `progress`."""
    return n * -(-wanted // _QUERIES)


class Found(NamedTuple):
    """Neighbours of m symbols: ids and cosines (m, k), best first; id -1 where there are fewer."""

    ids: numpy.ndarray
    cosines: numpy.ndarray

    def pairs(self, at: int) -> list[tuple[int, float]]:
        """The neighbours of one of the symbols."""
        both = zip(self.ids[at].tolist(), self.cosines[at].tolist())
        return [(number, cosine) for number, cosine in both if number >= 0]


@torch.no_grad()
def nearest(
    rows: Rows,
    n: int,
    wanted: list[int],
    k: int,
    leave_out: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Found:
    """The k nearest of n rows for each wanted one, without itself and `leave_out` (padding)."""
    ids = numpy.full((len(wanted), k), -1, dtype=numpy.int64)
    cosines = numpy.full((len(wanted), k), -numpy.inf)
    for first in range(0, len(wanted), _QUERIES):
        some = torch.tensor(wanted[first : first + _QUERIES])
        query = _unit(rows(some))
        part = slice(first, first + len(some))
        for start in range(0, n, _ROWS):
            other = torch.arange(start, min(start + _ROWS, n))
            score = (query @ _unit(rows(other)).t()).double().numpy()
            score = numpy.round(score, _DIGITS) + 0.0
            score[some[:, None].numpy() == other[None].numpy()] = -numpy.inf
            if leave_out is not None and start <= leave_out < start + len(other):
                score[:, leave_out - start] = -numpy.inf
            ids[part], cosines[part] = _best(ids[part], cosines[part], other.numpy(), score)
            if progress is not None:
                progress(len(other))
    ids[numpy.isneginf(cosines)] = -1
    return Found(ids, cosines)


def _best(
    ids: numpy.ndarray, cosines: numpy.ndarray, other: numpy.ndarray, score: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The best of those found so far, whose ids are lower, and of other ones."""
    k = ids.shape[1]
    all_ids = numpy.concatenate([ids, numpy.broadcast_to(other, score.shape)], 1)
    all_scores = numpy.concatenate([cosines, score], 1)
    if all_scores.shape[1] > 8 * k:
        # Only what reaches the k-th best score takes part in the sort that keeps the order of ids.
        limit = numpy.partition(all_scores, -k, axis=1)[:, -k]
        keep = (all_scores >= limit[:, None]).sum(1).max()
        order = numpy.argsort(all_scores < limit[:, None], axis=1, kind="stable")[:, :keep]
        all_ids = numpy.take_along_axis(all_ids, order, 1)
        all_scores = numpy.take_along_axis(all_scores, order, 1)
    order = numpy.argsort(-all_scores, axis=1, kind="stable")[:, :k]
    return numpy.take_along_axis(all_ids, order, 1), numpy.take_along_axis(all_scores, order, 1)


def _unit(rows: Tensor) -> Tensor:
    rows = rows.float()
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def overlap(ours: list[str], reference: list[str]) -> float | None:
    """The share of the reference's neighbours that are among ours."""
    return len(set(ours) & set(reference)) / len(reference) if reference else None
