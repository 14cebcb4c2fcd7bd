"""Product quantisation of a trained table: k-means in each group, then the nearest centroids; and
what a stored form has lost of a table."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from fairseq_dpq.codes import by_group, evaluation_codes
from fairseq_dpq.distances import DISTANCES
from fairseq_dpq.forms.packing import code_dtype
from fairseq_dpq.kmeans import kmeans

_ROWS = 1 << 15  # rows handled at once
_SOME = 1 << 13  # rows held in double precision at once


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
    real = torch.ones(n, dtype=torch.bool, device=table.device)
    if padding_idx is not None and n > 1:
        real[padding_idx] = False
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
