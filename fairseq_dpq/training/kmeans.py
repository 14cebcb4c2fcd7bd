"""Seeded k-means in many subspaces at once, in bounded memory; by the native library on a CPU."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.training.distances import wide_dtype

_CHUNK = 1 << 22  # distances held at once
ITERATIONS = 25


def assign(points: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid (G, K, size) of each point (G, n, size): (G, n) int64."""
    found = native.nearest(points.transpose(0, 1), centroids)
    if found is not None:
        return found[0].t().long()
    G, n, _ = points.shape
    half = centroids.pow(2).sum(-1).unsqueeze(1) / 2  # (G, 1, K)
    out = torch.empty(G, n, dtype=torch.int64, device=points.device)
    step = max(1, _CHUNK // (G * centroids.shape[1]))
    for start in range(0, n, step):
        chunk = points[:, start : start + step]
        out[:, start : start + step] = (
            torch.bmm(chunk, centroids.transpose(1, 2)).sub_(half).argmax(-1)
        )
    return out


def means(
    points: Tensor, codes: Tensor, K: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted mean of the points of each code, (G, K, size), and the codes' weights, (G, K)."""
    G, n, size = points.shape
    index = (codes + torch.arange(G, device=codes.device).unsqueeze(1) * K).reshape(-1)
    w = points.new_ones(G * n) if weight is None else weight.to(points.dtype).repeat(G)
    mass = points.new_zeros(G * K).index_add_(0, index, w)
    rows = points.reshape(G * n, size)
    rows = rows if weight is None else rows * w.unsqueeze(1)
    total = points.new_zeros(G * K, size).index_add_(0, index, rows)
    mean = total / mass.clamp_min(1e-12).unsqueeze(1)
    return mean.view(G, K, size), mass.view(G, K)


@torch.no_grad()
def kmeans(
    points: Tensor,
    K: int,
    *,
    weight: Tensor | None = None,
    iterations: int = ITERATIONS,
    seed: int = 0,
    max_points: int = 65536,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Centroids (G, K, size) of points (G, n, size), each of the G subspaces on its own.

    `weight` (n,) counts a point several times. More than `max_points` points are sampled. An empty
    cluster restarts at the point that is farthest from its centroid.
    """
    n = points.shape[1]
    generator = torch.Generator().manual_seed(seed)
    if n == 0:
        raise ValueError("k-means needs at least one point")
    if n > max_points:
        keep = torch.randperm(n, generator=generator)[:max_points].to(points.device)
        points = points.transpose(0, 1)[keep].transpose(0, 1)  # whole rows: several times faster
        weight = weight[keep] if weight is not None else None
        n = max_points
    points = points.float()
    centroids = _first_centroids(points, K, generator)
    for step in range(iterations):
        codes, mean, mass = _round(points, centroids, weight)
        empty = mass == 0
        if empty.any():
            mean = _refill(points, codes, mean, empty)
        moved = (mean - centroids).abs().amax()
        centroids = mean
        if progress is not None:
            progress(step + 1)
        if moved == 0:
            break
    return centroids


def _round(
    points: Tensor, centroids: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes (G, n) of the points, and the `means` of each code."""
    K, rows = centroids.shape[1], points.transpose(0, 1)
    found = native.nearest(rows, centroids)
    sums = None if found is None else native.centroid_sums(rows, found[0], K, weight)
    if found is None or sums is None:
        codes = assign(points, centroids)
        return (codes, *means(points, codes, K, weight))
    total, mass = sums
    return found[0].t(), (total / mass.clamp_min(1e-12).unsqueeze(-1)).float(), mass


def _first_centroids(points: Tensor, K: int, generator: torch.Generator) -> Tensor:
    """k-means++ on a sample: each next centroid is drawn by squared distance from the others."""
    G, n, size = points.shape
    if n > 16 * K:
        keep = torch.randperm(n, generator=generator)[: 16 * K].to(points.device)
        points, n = points.transpose(0, 1)[keep].transpose(0, 1), 16 * K
    draw = torch.rand(G, K, generator=generator).to(points.device)
    found = native.first_centroids(points.transpose(0, 1), draw)
    if found is not None:
        return found
    chosen = points.new_empty(G, K, size)
    nearest = points.new_ones(G, n)
    everyone = torch.arange(G, device=points.device)
    wide = wide_dtype(points.device)
    for k in range(K):
        total = nearest.to(wide).cumsum(1)
        total = total + torch.arange(1, n + 1, device=points.device) * 1e-30  # all points coincide
        pick = torch.searchsorted(total, draw[:, k : k + 1].to(wide) * total[:, -1:])
        chosen[:, k] = points[everyone, pick.squeeze(1).clamp_max(n - 1)]
        distance = (points - chosen[:, k : k + 1]).pow(2).sum(-1)
        nearest = distance if k == 0 else torch.minimum(nearest, distance)
    return chosen


def _refill(points: Tensor, codes: Tensor, mean: Tensor, empty: Tensor) -> Tensor:
    for g in empty.any(1).nonzero().flatten().tolist():
        error = (points[g] - mean[g][codes[g].long()]).pow(2).sum(-1)
        wanted = empty[g].nonzero().flatten()
        worst = error.topk(min(wanted.numel(), error.numel())).indices
        mean[g, wanted[: worst.numel()]] = points[g, worst]
    return mean
