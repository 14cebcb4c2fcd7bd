"""Lossless shrinking of product codes: codes that no symbol uses are dropped and the others
renumbered. The same outputs, fewer bytes."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 1 << 13


def drop_unused(
    codes: Tensor, values: Tensor, padding_idx: int | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Codes (n, D) renumbered without those that no symbol uses; values (rows, d/D); sizes (D,)."""
    n, D = codes.shape
    G, K, _ = values.shape
    used = torch.zeros(D, K, dtype=torch.bool)
    real = torch.ones(n, dtype=torch.bool)
    if padding_idx is not None:
        real[padding_idx] = False
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
