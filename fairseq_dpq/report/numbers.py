"""What a table's codes say: their use, symbols that share them, change, distance of queries.
The analysis of the paper's appendix C."""

from __future__ import annotations

import math
from typing import Any, Sequence

import numpy
import torch
from torch import Tensor

from fairseq_dpq.forms.packing import code_bits, pack_codes
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.training.codes import look_up, usage_of_counts

_ROWS = 1 << 13  # rows handled at once
_BINS = 40
SAMPLE = 100_000  # queries whose distance is measured


def code_use(counts: Tensor, sizes: Sequence[int]) -> dict[str, Any]:
    """Codes in use and entropy of each group, and their means."""
    used, entropy = usage_of_counts(counts).values()
    return {
        "used": used.tolist(),
        "sizes": list(sizes),
        "entropy_bits": [round(x, 4) + 0.0 for x in entropy.tolist()],
        "used_share": float(used.sum()) / max(sum(sizes), 1),
        "entropy_bits_per_symbol": float(entropy.sum()) + 0.0,
        "possible_bits_per_symbol": sum(map(math.log2, sizes)),
    }


def shared_codes(codes: Tensor, sizes: Sequence[int], padding_idx: int | None) -> dict[str, Any]:
    """Symbols that have all their codes in common with another one, padding left out."""
    ids = numpy.arange(codes.shape[0])
    if padding_idx is not None:
        ids = numpy.delete(ids, padding_idx)
    packed = pack_codes(codes, [code_bits(size) for size in sizes]).numpy()[ids]
    packed = numpy.ascontiguousarray(packed)
    rows = packed.view(numpy.dtype((numpy.void, packed.shape[1]))).reshape(-1)
    _, inverse, counts = numpy.unique(rows, return_inverse=True, return_counts=True)
    several = numpy.flatnonzero(counts > 1)
    largest = several[numpy.argsort(-counts[several], kind="stable")][:5]
    members = [ids[numpy.flatnonzero(inverse.reshape(-1) == number)[:8]] for number in largest]
    return {
        "symbols": len(ids),
        "distinct": len(counts),
        "sharing": int(counts[several].sum()),
        "largest": int(counts.max()) if len(counts) else 0,
        "largest_sets": [
            {"size": int(counts[number]), "ids": some.tolist()}
            for number, some in zip(largest, members)
        ],
    }


def code_change(old: Tensor, new: Tensor, sizes: Sequence[int]) -> dict[str, float]:
    """Shares of codes, of symbols with such a code, and of code bits that differ."""
    codes = symbols = flipped = 0
    widest = max(code_bits(size) for size in sizes)
    for start in range(0, old.shape[0], _ROWS):
        a, b = old[start : start + _ROWS].long(), new[start : start + _ROWS].long()
        differ = a ^ b
        codes += int((differ != 0).sum())
        symbols += int((differ != 0).any(1).sum())
        flipped += sum(int(((differ >> bit) & 1).sum()) for bit in range(widest))
    bits = old.shape[0] * sum(code_bits(size) for size in sizes)
    return {
        "codes": codes / max(old.numel(), 1),
        "symbols": symbols / max(old.shape[0], 1),
        "bits": flipped / max(bits, 1),
    }


@torch.no_grad()
def query_distances(layer: DPQEmbedding, codes: Tensor) -> dict[str, Any] | None:
    """How far queries are from the centroids (keys) of their codes, in units of the query's own
    length: 0 on the centroid, 1 as far as the origin. None for a method without keys."""
    by_group = getattr(layer.method, "by_group", None)  # of methods that compare with keys
    if by_group is None:
        return None
    ids = torch.arange(layer.num_embeddings)
    if layer.padding_idx is not None:
        ids = ids[ids != layer.padding_idx]
    total = len(ids)
    if total > SAMPLE:
        ids = ids[torch.linspace(0, total - 1, SAMPLE).long()]
    keys = layer.codebook().keys.double()  # the square of a float may be beyond a float
    found: dict[str, list[Tensor]] = {"relative": [], "distance": [], "cosine": []}
    for some in ids.split(_ROWS):
        query = by_group(layer.query[some], layer.config).double()  # (rows, D, key size)
        centroid = look_up(keys, codes[some].long())
        distance = (query - centroid).pow(2).sum(-1)  # (rows, D)
        length = query.pow(2).sum(-1)
        found["distance"].append(distance.sqrt().mean(1))
        found["relative"].append((distance.sum(1) / length.sum(1).clamp_min(1e-30)).sqrt())
        found["cosine"].append(torch.cosine_similarity(query, centroid, dim=-1).mean(1))
    spreads = {name: _spread(torch.cat(parts), name == "relative") for name, parts in found.items()}
    return {"symbols": total, "measured": len(ids), **spreads}


def _spread(values: Tensor, histogram: bool) -> dict[str, Any]:
    """Mean and quantiles; a histogram up to the 99th percentile, what is beyond in the last bin."""
    numbers = values.numpy()
    if not len(numbers):
        return {"mean": None, "median": None, "p90": None}
    out: dict[str, Any] = {
        "mean": float(numbers.mean()),
        "median": float(numpy.median(numbers)),
        "p90": float(numpy.quantile(numbers, 0.9)),
    }
    if histogram:
        top = max(float(numpy.quantile(numbers, 0.99)), 1e-12)
        counts, edges = numpy.histogram(numpy.minimum(numbers, top), bins=_BINS, range=(0, top))
        out["histogram"] = {"counts": counts.tolist(), "edges": edges.tolist()}
    return out
