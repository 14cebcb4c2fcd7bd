"""From responses to codes, and from codes to value rows.

Shapes: query (tokens, D, size), keys (G, K, size), values (G, K, d/D) with G = D, or 1 when
subspaces are shared; codes (tokens, D).

A matrix product rounds differently with the shape of the batch, the number of threads and the
device, so the same token could get one code alone and another in the whole vocabulary. A code is
therefore *defined* by responses that are summed over one dimension after the other, in elementwise
float32 operations that IEEE 754 rounds alike everywhere. The native library computes just that.
"""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.training.distances import Dot, Stats, wide_dtype

_CPU_CHUNK = 1 << 19  # responses held at once on a CPU: a few MB, so that they stay in cache
_GPU_CHUNK = 1 << 24
_ROWS = 1 << 12  # rows counted at once


def value_rows(codes: Tensor, G: int, K: int) -> Tensor:
    """The row of the flat (G * K, size) value matrix that each code (tokens, D) stands for."""
    if G > 1:
        codes = codes + torch.arange(G, device=codes.device, dtype=codes.dtype) * K
    return codes.reshape(-1)


def look_up(values: Tensor, codes: Tensor) -> Tensor:
    """The value rows of codes (tokens, D): (tokens, D, d/D)."""
    G, K, size = values.shape
    rows = values.reshape(G * K, size).index_select(0, value_rows(codes, G, K))
    return rows.view(codes.shape[0], codes.shape[1], size)


def sum_by_code(rows: Tensor, codes: Tensor, G: int, K: int) -> Tensor:
    """Sum rows (tokens, D, size) into their codes: (G, K, size)."""
    size = rows.shape[-1]
    out = rows.new_zeros(G * K, size)
    return out.index_add_(0, value_rows(codes, G, K), rows.reshape(-1, size)).view(G, K, size)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows one after the other; no copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def chunks(query: Tensor, K: int) -> list[slice]:
    """Slices of the rows of a query (tokens, D, size) whose responses are held at once."""
    limit = _CPU_CHUNK if query.device.type == "cpu" else _GPU_CHUNK
    step = max(1, limit // (query.shape[1] * K))
    return [slice(start, start + step) for start in range(0, query.shape[0], step)]


def by_group(rows: Tensor, G: int) -> Tensor:
    """Rows (tokens, D, size) by group: (G, tokens, size), each group's rows together.

    Groups that share their keys are that many more tokens of one group.
    """
    if G == 1:
        return rows.reshape(1, -1, rows.shape[-1])
    return rows.transpose(0, 1).contiguous()


@torch.no_grad()
def evaluation_codes(query: Tensor, keys: Tensor, distance: Dot, stats: Stats | None) -> Tensor:
    """Codes (tokens, D), int64, that do not depend on batch shape, threads or device."""
    normalization = () if stats is None else (stats.mean, stats.scale())
    found = native.codes(query, keys, distance.name, *normalization)
    return ordered_codes(query, keys, distance, stats) if found is None else found


def ordered_codes(query: Tensor, keys: Tensor, distance: Dot, stats: Stats | None) -> Tensor:
    """The definition of a code, in PyTorch."""
    codes = torch.empty(query.shape[:2], dtype=torch.int64, device=query.device)
    keys = keys.float()
    for part in chunks(query, 4 * keys.shape[1]):  # with what each step of the sum takes
        response = distance.response(query[part].float(), keys)
        if stats is not None:
            response = stats.normalize(response)
        codes[part] = response.argmax(-1)
    return codes


def code_usage(
    codes: Tensor,
    K: int,
    padding_idx: int | None = None,
    unpack: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Per group of codes (n, D): `used` codes and their `entropy` in bits, padding left out.

    `unpack` turns some rows into their codes where they are stored otherwise.
    """
    return usage_of_counts(code_counts(codes, K, padding_idx, unpack))


def usage_of_counts(counts: Tensor) -> dict[str, Tensor]:
    """Per group of counts (D, K): `used` codes and their `entropy` in bits."""
    p = counts.to(wide_dtype(counts.device)) / counts.sum(1, keepdim=True).clamp_min(1)
    entropy = -(p * p.clamp_min(1e-30).log2()).sum(1)
    return {"used": (counts > 0).sum(1), "entropy": entropy.float()}


def code_counts(
    codes: Tensor,
    K: int,
    padding_idx: int | None = None,
    unpack: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """How many symbols have each code: (D, K), padding left out."""

    def rows(part: slice) -> Tensor:
        return (codes[part] if unpack is None else unpack(codes[part])).long()

    D = rows(slice(0)).shape[1]
    counts = torch.zeros(D * K, dtype=torch.int64, device=codes.device)
    offset = torch.arange(D, device=codes.device) * K
    for start in range(0, codes.shape[0], _ROWS):
        index = (rows(slice(start, start + _ROWS)) + offset).reshape(-1)
        counts += torch.bincount(index, minlength=D * K)
    counts = counts.view(D, K)
    if padding_idx is not None:
        row = padding_idx % codes.shape[0]
        padding = rows(slice(row, row + 1))[0]
        counts[torch.arange(D, device=codes.device), padding] -= 1
    return counts
