"""Which D would lose less of a table: product quantisation of a sample of its rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_dpq.codes import by_group
from fairseq_dpq.config import DPQConfig
from fairseq_dpq.initialization import real_rows
from fairseq_dpq.kmeans import assign, kmeans

HIGH = 0.25  # of a table's squared norm: more is worth a warning
_ROWS = 4096
_ITERATIONS = 8


class Better(NamedTuple):
    """Another D, what it would lose of the squared norm, and the compression ratio with it."""

    D: int
    error: float
    ratio: float


@torch.no_grad()
def sampled_error(rows: Tensor, config: DPQConfig, seed: int = 0) -> float:
    """Squared error of product quantisation of some rows (n, d), as a share of their norm."""
    D = config.D or 1
    points = by_group(rows.float().view(len(rows), D, -1), 1 if config.share_subspaces else D)
    centroids = kmeans(points, config.K, iterations=_ITERATIONS, seed=seed)
    codes = assign(points, centroids)
    error = sum(float((p - c[k]).pow(2).sum()) for p, c, k in zip(points, centroids, codes))
    return error / max(float(points.pow(2).sum()), 1e-300)


def better_D(table: Tensor, config: DPQConfig, pad: int | None, seed: int = 0) -> Better | None:
    """The smallest D above that of `config` whose error is not high, or else the best; None if
    there is none above."""
    n, d = table.shape
    real = real_rows(table, pad).nonzero().squeeze(1)
    count = max(_ROWS, 64 * config.K)  # enough rows for each centroid
    pick = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed))[:count]
    rows = table[real[pick]]
    found = None
    for D in [D for D in range((config.D or 0) + 1, d + 1) if d % D == 0]:
        other = DPQConfig(K=config.K, D=D, share_subspaces=config.share_subspaces)
        found = Better(D, sampled_error(rows, other, seed), other.compression_ratio(n, d))
        if found.error < HIGH:
            break
    return found
