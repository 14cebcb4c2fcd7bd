"""Product quantisation, group after group: rows count by their weight, errors by a metric, and each
group makes up for the errors of the groups before it."""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch import Tensor

from fairseq_dpq.forms.packing import code_dtype
from fairseq_dpq.training.kmeans import assign, kmeans

_ROWS = 1 << 13  # rows encoded at once
_FITTED = 1 << 14  # rows that values are fitted to
_ROUNDS = 10  # of k-means in each group


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
    for start in range(0, len(share), _ROWS):
        part = slice(start, start + _ROWS)
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
    done = 0
    for start in range(0, n, _ROWS):
        part = slice(start, start + _ROWS)
        rows = table[own[part]].float()
        codes[part] = _encode(rows, values, factors, None).to(codes.dtype)
        while progress is not None and done < D * min(n, start + _ROWS) // n:
            progress(1)
            done += 1
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
