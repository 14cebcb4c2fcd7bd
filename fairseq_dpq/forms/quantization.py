"""Product quantisation of a trained table: k-means in each group, then the nearest centroids; what
that loses, which D would lose less, and codes that nobody uses."""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from fairseq_dpq.forms.base import Improvement
from fairseq_dpq.forms.packing import code_bits, code_dtype
from fairseq_dpq.training.codes import by_group, evaluation_codes
from fairseq_dpq.training.distances import DISTANCES
from fairseq_dpq.training.initialization import real_rows
from fairseq_dpq.training.kmeans import assign, kmeans

_ROWS = 1 << 15  # rows handled at once
_SOME = 1 << 13  # rows held in double precision at once
_SAMPLE = 4096  # rows by which a D is judged
_FIT_ITERATIONS = 10
HIGH_ERROR = 0.25  # of a table's squared norm: more is worth a warning


@torch.no_grad()
def product_quantize(
    table: Tensor,
    K: int,
    D: int,
    groups: int,
    padding_idx: int | None,
    seed: int,
    progress: Callable[[int], None] | None,
) -> tuple[Tensor, Tensor]:
    """Codes (n, D) and centroids (groups, K, d/D) of a table (n, d)."""
    n, d = table.shape
    real = real_rows(table, padding_idx)
    points = by_group(table.float()[real].view(-1, D, d // D), groups)
    centroids = kmeans(points, K, seed=seed, progress=progress)
    codes = torch.empty(n, D, dtype=code_dtype(K), device=table.device)
    for start in range(0, n, _ROWS):
        rows = table[start : start + _ROWS].float().view(-1, D, d // D)
        part = evaluation_codes(rows, centroids, DISTANCES["euclidean"], None)
        codes[start : start + _ROWS] = part.to(codes.dtype)
    if padding_idx is not None:
        codes[padding_idx] = 0
    return codes, centroids


@torch.no_grad()
def nearest_codes(rows: Tensor, values: Tensor, sizes: Sequence[int], shared: bool) -> Tensor:
    """The nearest of the value rows (rows, d/D) for each part of some rows: (n, D)."""
    groups = [values] * len(sizes) if shared else values.split(list(sizes))
    parts = rows.float().chunk(len(sizes), 1)
    return torch.stack([torch.cdist(p, v.float()).argmin(1) for p, v in zip(parts, groups)], 1)


@torch.no_grad()
def reconstruction_error(full: Tensor, form: Callable[[Tensor], Tensor], pad: int | None) -> float:
    """Squared error of the form's rows as a share of the table's squared norm."""
    error = norm = 0.0
    for start in range(0, len(full), _SOME):
        rows = torch.arange(start, min(start + _SOME, len(full)), device=full.device)
        rows = rows[rows != pad] if pad is not None else rows
        part = full[rows].double()
        error += float((part - form(rows).double()).pow(2).sum())
        norm += float(part.pow(2).sum())
    return error / max(norm, 1e-300)


@torch.no_grad()
def fit_error(rows: Tensor, K: int, D: int, shared: bool, seed: int = 0) -> float:
    """Squared error of a quick k-means of some rows (n, d), as a share of their squared norm."""
    n, d = rows.shape
    points = by_group(rows.float().view(n, D, d // D), 1 if shared else D)
    centroids = kmeans(points, K, iterations=_FIT_ITERATIONS, seed=seed)
    index = assign(points, centroids).unsqueeze(-1).expand(-1, -1, d // D)
    lost = (points - centroids.gather(1, index)).double().pow(2).sum()
    return float(lost / rows.double().pow(2).sum().clamp_min(1e-300))


def better_D(
    table: Tensor, K: int, D: int, shared: bool, pad: int | None, seed: int = 0
) -> Improvement | None:
    """The smallest larger D whose error on a sample is not high, or else the largest; None if there
    is none."""
    n, d = table.shape
    real = real_rows(table, pad).nonzero().squeeze(1)
    count = max(_SAMPLE, 64 * K)  # enough rows for each centroid
    pick = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed))[:count]
    rows = table[real[pick]]
    found = None
    for other in [x for x in range(D + 1, d + 1) if d % x == 0]:
        bits = n * other * code_bits(K) + 32 * K * d // (other if shared else 1)
        error = fit_error(rows, K, other, shared, seed)
        found = Improvement({"D": other}, error, 32 * n * d / bits)
        if error < HIGH_ERROR:
            break
    return found


def drop_unused(
    codes: Tensor, values: Tensor, padding_idx: int | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Codes (n, D) renumbered without those that no symbol uses; values (rows, d/D); sizes (D,)."""
    n, D = codes.shape
    G, K, _ = values.shape
    used = torch.zeros(D, K, dtype=torch.bool)
    real = real_rows(codes, padding_idx)
    group = torch.arange(D)
    for start in range(0, n, _ROWS):
        part = codes[start : start + _ROWS][real[start : start + _ROWS]].long()
        used[group.expand_as(part), part] = True
    if G == 1 and D > 1:
        used = used.any(0, keepdim=True).repeat(D, 1)
    used[~used.any(1), 0] = True  # a table of nothing but padding still has a code
    number = (used.cumsum(1) - 1).clamp_min_(0)  # (D, K) the new number of each code
    new = torch.empty_like(codes)
    for start in range(0, n, _ROWS):
        part = codes[start : start + _ROWS].long()
        new[start : start + _ROWS] = number[group.expand_as(part), part].to(codes.dtype)
    if padding_idx is not None:
        new[padding_idx] = 0
    return new, values[used[:G]], used.sum(1).tolist()


def rescaled(
    progress: Callable[[int], None] | None, work: int, total: int
) -> Callable[[int], None]:
    """Turns `total` steps into `work` of them, for a bar that was promised those."""
    done = said = 0

    def report(more: int) -> None:
        nonlocal done, said
        done += more
        while progress is not None and said < work * done // total:
            said += 1
            progress(1)

    return report
