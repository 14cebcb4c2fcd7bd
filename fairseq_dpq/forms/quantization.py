"""Product quantisation of a trained table: k-means in each group, then the nearest centroids, or
group after group in a metric; what is lost, which D would lose less, codes that nobody uses."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from fairseq_dpq.forms.base import Improvement
from fairseq_dpq.forms.packing import code_bits, code_dtype
from fairseq_dpq.training.codes import by_group, code_counts, evaluation_codes
from fairseq_dpq.training.distances import DISTANCES
from fairseq_dpq.training.initialization import Trained, real_rows
from fairseq_dpq.training.kmeans import assign, kmeans

_ROWS = 1 << 15  # rows handled at once
_SOME = 1 << 13  # the same where more is kept of each
_FITTED = 1 << 14  # rows that values are fitted to
_ROUNDS = 10  # of a quick k-means
_SAMPLE = 4096  # rows by which a D is judged
HIGH_ERROR = 0.25  # of a table's squared norm: more is worth a warning


@torch.no_grad()
def product_quantize(trained: Trained, K: int, D: int, groups: int) -> tuple[Tensor, Tensor]:
    """Codes (n, D) and centroids (groups, K, d/D) of a table (n, d)."""
    table = trained.table
    rows = table.float()[trained.real]
    points = by_group(rows.view(len(rows), D, -1), groups)
    centroids = kmeans(points, K, seed=trained.seed, progress=trained.progress)
    codes = torch.empty(len(table), D, dtype=code_dtype(K), device=table.device)
    for rows, out in zip(table.split(_ROWS), codes.split(_ROWS)):
        parts = rows.float().view(len(rows), D, -1)
        out.copy_(evaluation_codes(parts, centroids, DISTANCES["euclidean"], None))
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
    centroids = kmeans(points, K, iterations=_ROUNDS, seed=seed)
    index = assign(points, centroids).unsqueeze(-1).expand(-1, -1, d // D)
    lost = (points - centroids.gather(1, index)).double().pow(2).sum()
    return float(lost / rows.double().pow(2).sum().clamp_min(1e-300))


def better_D(
    table: Tensor, K: int, D: int, shared: bool, pad: int | None, seed: int = 0
) -> Improvement | None:
    """The smallest larger D whose error on a sample is not high, or else the largest, if any."""
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
    (G, K, _), D = values.shape, codes.shape[1]
    used = code_counts(codes, K, padding_idx) > 0
    if G == 1 and D > 1:
        used = used.any(0, keepdim=True).repeat(D, 1)
    used[~used.any(1), 0] = True  # a table of nothing but padding still has a code
    number = (used.cumsum(1) - 1).clamp_min_(0)  # (D, K) the new number of each code
    new, group = torch.empty_like(codes), torch.arange(D, device=codes.device)
    for rows, out in zip(codes.split(_ROWS), new.split(_ROWS)):
        out.copy_(number[group.expand_as(rows), rows.long()])
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


# In a metric --------------------------------------------------------------------------------------


class _Factors(NamedTuple):
    """A metric M (d, d) as e' M e = sum over groups j of |roots[j] f_j|^2 with f = feedback e: what
    group j sees of its own error and of those before it."""

    feedback: Tensor  # (d, d), lower triangular in blocks, with ones on its diagonal
    roots: Tensor  # (D, size, size)


def _factors(metric: Tensor, D: int) -> _Factors:
    d = metric.shape[0]
    size = d // D
    upper = torch.linalg.cholesky(metric.double().flip(0, 1)).flip(0, 1)  # metric = upper upper'
    blocks = torch.stack([upper[i : i + size, i : i + size] for i in range(0, d, size)])
    scaled = upper.view(d, D, size).transpose(0, 1) @ torch.linalg.inv(blocks)  # (D, d, size)
    feedback = scaled.transpose(0, 1).reshape(d, d).t()
    return _Factors(feedback.float().contiguous(), blocks.transpose(1, 2).float().contiguous())


def metric_gain(metric: Tensor, spread: Tensor) -> float:
    """What share of the plain error remains in a metric if groups make up for each other; `spread`
    (d, d) is the covariance of the rows."""
    roots = _factors(metric, metric.shape[0]).roots.double()
    energy = (metric.double() * spread.double()).sum()
    return float(roots.pow(2).mean() * spread.double().trace() / energy)


def weighted_mean(table: Tensor, share: Tensor, rows: Tensor | None = None) -> Tensor:
    """The mean (d,) of the rows of a table, all or some, by their shares."""
    total = torch.zeros(table.shape[1], device=table.device)
    for start in range(0, len(share), _SOME):
        part = slice(start, start + _SOME)
        total += share[part] @ (table[part] if rows is None else table[rows[part]]).float()
    return total


@torch.no_grad()
def quantize_in_metric(
    table: Tensor,
    K: int,
    D: int,
    own: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    metric: Tensor | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes (n, D) and float16 values (D, K, d/D) of a table (n, d), or of its `own` rows.

    `metric` (d, d) says what an error e of a row costs, e' M e; None for the plain square. Codes
    are chosen as GPTQ (arXiv 2210.17323) and GPTVQ (arXiv 2402.15319) do it for the weights of a
    linear layer. `progress` is called 2 D times.
    """
    d = table.shape[1]
    if own is None:
        own = torch.arange(len(table), device=table.device)
    n = len(own)
    factors = None if metric is None else _factors(metric, D)
    fitted, counted = own, weight
    if n > _FITTED:
        some = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:_FITTED]
        some = some.to(table.device)
        fitted, counted = own[some], None if weight is None else weight[some]

    def fit(j: int, points: Tensor) -> Tensor:
        if progress is not None:
            progress(1)
        if len(points) <= K:  # a value for each
            return torch.cat([points, points.new_zeros(K - len(points), points.shape[1])])
        one = points.unsqueeze(0)
        return kmeans(one, K, weight=counted, iterations=_ROUNDS, seed=seed + j)[0]

    values = torch.empty(D, K, d // D, dtype=torch.float16, device=table.device)
    _encode(table[fitted].float(), values, factors, fit)
    codes = torch.empty(n, D, dtype=code_dtype(K), device=table.device)
    report = rescaled(progress, D, n)
    for some, out in zip(own.split(_SOME), codes.split(_SOME)):
        out.copy_(_encode(table[some].float(), values, factors, None))
        report(len(some))
    return codes, values


def _encode(
    rows: Tensor,
    values: Tensor,
    factors: _Factors | None,
    fit: Callable[[int, Tensor], Tensor] | None,
) -> Tensor:
    """Codes (n, D) of rows (n, d). With `fit`, it first sets the values of each group."""
    D, _, size = values.shape
    codes = torch.empty(len(rows), D, dtype=torch.int64, device=rows.device)
    errors = torch.zeros_like(rows)
    for j in range(D):
        own = slice(j * size, (j + 1) * size)
        points = rows[:, own]
        if factors is not None:
            points = points + errors[:, : own.start] @ factors.feedback[own, : own.start].t()
            points = points @ factors.roots[j].t()
        points = points.contiguous()
        if fit is not None:
            centroids = fit(j, points)
            if factors is not None:
                centroids = centroids @ torch.linalg.inv(factors.roots[j]).t()
            values[j] = centroids
        stored = values[j].float()
        centroids = stored if factors is None else stored @ factors.roots[j].t()
        codes[:, j] = assign(points.unsqueeze(0), centroids.unsqueeze(0))[0]
        errors[:, own] = rows[:, own] - stored[codes[:, j]]
    return codes
