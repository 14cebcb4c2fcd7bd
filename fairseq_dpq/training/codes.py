"""From responses to codes, and from codes to value rows.

Shapes: query (tokens, D, size), keys (G, K, size), values (G, K, d/D) with G = D, or 1 when
subspaces are shared; codes (tokens, D).

A matrix product rounds differently with the shape of the batch, the number of threads and the
device, so the same token could get one code alone and another in the whole vocabulary. In
evaluation, export and compaction a code is therefore *defined* by responses that are summed over
one dimension after the other, in elementwise float32 operations that IEEE 754 rounds alike
everywhere. The native library computes just that. Without it the matrix product finds the code
wherever the best response leads by more than both roundings can amount to, and only near ties are
worked out the slow way.
"""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.training.distances import Dot, wide_dtype
from fairseq_dpq.training.normalization import Stats

_CPU_CHUNK = 1 << 19  # responses held at once on a CPU: a few MB, so that they stay in cache
_GPU_CHUNK = 1 << 24
_ROWS = 1 << 12  # rows counted at once


def best_codes(score: Tensor) -> Tensor:
    """argmax over the last dimension, the first of several, for training.

    On a CPU argmax is not vectorised and takes longer than everything else that codes need. Here
    the best become K - 1 - k and all others negative, and two vectorised maxima do.
    """
    K = score.shape[-1]
    if score.device.type != "cpu" or not score.numel():
        return score.argmax(-1)
    rank = score - score.amax(-1, keepdim=True)
    rank.mul_(1e30).clamp_min_(-K).add_(torch.arange(K - 1, -1, -1, dtype=score.dtype))
    return (K - 1 - rank.amax(-1).long()).clamp_(0, K - 1)


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
    D = query.shape[1]
    normalization = () if stats is None else (stats.mean, stats.scale())
    found = native.codes(query, keys, distance.name, *normalization)
    if query.is_cuda:
        found = native.gpu_codes(query, keys, distance, *normalization)
    if found is not None:
        return found
    query, keys = query.float(), keys.float()
    bound = _lead_bound(keys, distance, stats)
    parts = [
        _codes_of_chunk(query[part], keys, distance, stats, bound)
        for part in chunks(query, keys.shape[1])
    ]
    if not parts:
        return torch.empty(0, D, dtype=torch.int64, device=query.device)
    return joined(parts)


def _codes_of_chunk(
    query: Tensor, keys: Tensor, distance: Dot, stats: Stats | None, bound: tuple[Tensor, Tensor]
) -> Tensor:
    rows, D, _ = query.shape
    G, K, _ = keys.shape
    own = by_group(query, G)
    score = distance.scores(own, keys)
    if stats is not None:
        score.sub_(stats.mean.unsqueeze(-1)).mul_(stats.scale().unsqueeze(-1))
    slope, offset = bound
    lead = slope.unsqueeze(-1) * distance.query_size(own) + offset.unsqueeze(-1)  # (G, tokens)
    candidate = (score >= (score.amax(1) - lead).unsqueeze(1)).to(score.dtype)
    up = torch.arange(K, dtype=score.dtype, device=score.device).unsqueeze(-1)
    last = (candidate * up).amax(1)
    first = (K - 1) - candidate.mul_(up.flip(0)).amax(1)
    codes = last.long()
    group, token = (first != last).nonzero(as_tuple=True)
    shared = G == 1
    codes = codes.view(rows, D) if shared else codes.t().contiguous()
    row, group = (token // D, token % D) if shared else (token, group)
    # Each tie takes a copy of its group's keys, K * size numbers, unless all groups share them.
    step = max(1, _CPU_CHUNK // (K if shared else keys[0].numel()))
    for start in range(0, row.numel(), step):
        r, j = row[start : start + step], group[start : start + step]
        codes[r, j] = _ordered_codes(query[r, j], keys, j, distance, stats)
    return codes


def _lead_bound(keys: Tensor, distance: Dot, stats: Stats | None) -> tuple[Tensor, Tensor]:
    """(slope, offset), each (G,): a lead above slope * query size + offset cannot be rounding.

    u, the rounding of one operation, is larger where the user lets matrix products be less
    precise (TF32, bfloat16).
    """
    exact = getattr(torch, "get_float32_matmul_precision", lambda: "highest")() == "highest"
    tf32 = keys.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    u = 2.0**-24 if exact and not tf32 else 2.0**-7
    slope, offset = distance.rounding(keys, 4 * (keys.shape[-1] + 8) * u)
    if stats is not None:
        scale = stats.scale().amax(-1)
        slope = slope * scale
        offset = (offset + 8 * 2.0**-24 * stats.mean.abs().amax(-1)) * scale
    return 2 * slope, 2 * offset


def _ordered_codes(
    query: Tensor, keys: Tensor, group: Tensor, distance: Dot, stats: Stats | None
) -> Tensor:
    """Codes of queries (rows, size), each of its own group, summed in a fixed order."""
    own = keys[group] if keys.shape[0] > 1 else keys  # (rows or 1, K, size)
    total = distance.ordered_response(query, own)
    if stats is not None:
        j = group if stats.mean.shape[0] > 1 else torch.zeros_like(group)
        total = (total - stats.mean[j]) * stats.scale()[j]
    return total.argmax(-1)


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
