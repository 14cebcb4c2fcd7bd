"""A round of k-means by the library: nearest centroids, and the sums of the points of each.

Points (n, D, size) may be a view of a table (n, d): `table.view(n, D, -1)` is not copied. Each
group has its own centroids (D, K, size), or all share (1, K, size). The functions return None where
PyTorch must serve.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
from torch import Tensor

from fairseq_dpq.native import library
from fairseq_dpq.native.checks import BYTES, MOST_CODES, aligned, call, dims, expect, serves

_ROWS = 1 << 15  # rows turned into float32 at once where they are of another type


@torch.no_grad()
def nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Codes (n, D) of the nearest centroids, uint8 up to K=256 and else int16, and the sums of
    squared distances (D,), float64. A point with a NaN has code 0.

    Neither depends on the number of threads or on the instruction set.
    """
    lib = serves(points, centroids)
    n, D, size = dims("points", points, "n, D, size")
    G, K, _ = dims("centroids", centroids, "G, K, size")
    expect("centroids", centroids, (D, K, size), (1, K, size))
    if lib is None or not (D and K and size) or K > MOST_CODES or not _real(points, centroids):
        return None
    centroids = aligned(centroids.float())
    codes = points.new_empty(n, D, dtype=torch.uint8 if K <= 256 else torch.int16)
    error = points.new_zeros(D, dtype=torch.float64)
    for start, part in _parts(points):
        job = {"codes": codes[start:], "centroids": centroids, "error": error}
        _call(lib.dpq_nearest, part, K, G, start, **job)
    return codes, error


@torch.no_grad()
def centroid_sums(
    points: Tensor, codes: Tensor, K: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """The weighted sums (D, K, size) of the points of each code (n, D), and the sums of their
    weights (D, K), both float64 and added in the order of the rows. `weights` are (n,)."""
    lib = serves(points, codes, weights)
    n, D, size = dims("points", points, "n, D, size")
    expect("codes", codes, (n, D))
    if weights is not None:
        expect("weights", weights, (n,))
    if not 1 <= K <= MOST_CODES:
        raise ValueError(f"K={K} must be from 1 to {MOST_CODES}")
    if lib is None or not (D and size) or codes.dtype not in BYTES or not _real(points, weights):
        return None
    if codes.dtype is torch.uint8 and K > 256:
        codes = codes.to(torch.int16)
    codes = aligned(codes)
    weights = None if weights is None else aligned(weights.float())
    sums = points.new_zeros(D, K, size, dtype=torch.float64)
    mass = points.new_zeros(D, K, dtype=torch.float64)
    for start, part in _parts(points):
        counted = None if weights is None else weights[start:]
        job = {"codes": codes[start:], "weights": counted, "sums": sums, "mass": mass}
        _call(lib.dpq_sums, part, K, D, start, **job)
    return sums, mass


@torch.no_grad()
def first_centroids(points: Tensor, draws: Tensor) -> Tensor | None:
    """Centroids (D, K, size) to begin with, by k-means++: the next one is drawn by its squared
    distance from those before it. `draws` (D, K) are uniform in [0, 1)."""
    lib = serves(points, draws)
    n, D, size = dims("points", points, "n, D, size")
    _, K = dims("draws", draws, "D, K")
    expect("draws", draws, (D, K))
    if not n:
        raise ValueError("points has no rows; k-means needs at least one point")
    if lib is None or not (D and K and size) or K > MOST_CODES or not _real(points, draws):
        return None
    draws, points = aligned(draws.double()), points.float()
    if points.stride(2) != 1 or points.data_ptr() % 4:
        points = aligned(points)
    out = points.new_empty(D, K, size)
    _call(lib.dpq_first_centroids, points, K, D, 0, draws=draws, first=out)
    return out


def _real(*tensors: Tensor | None) -> bool:
    return all(t is None or t.is_floating_point() for t in tensors)


def _parts(points: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Points as the library takes them, and the number of the first: all at once, not copied, if
    they are float32 and a group's numbers lie side by side."""
    plain = points.dtype is torch.float32 and points.stride(2) == 1 and points.data_ptr() % 4 == 0
    step = max(1, points.shape[0]) if plain else _ROWS
    for start in range(0, points.shape[0], step):
        part = points[start : start + step]
        yield start, part if plain else aligned(part.float())


def _call(
    function: Any, points: Tensor, K: int, G: int, start: int, **tensors: Tensor | None
) -> None:
    n, D, size = points.shape
    codes = tensors.get("codes")
    job: dict[str, Any] = {"points": points, "n": n, "D": D, "size": size, "G": G, "K": K}
    job.update(stride=points.stride(0), group_stride=points.stride(1))
    job.update(code_bytes=8 if codes is None else BYTES[codes.dtype], **tensors)
    call(function, library.ClustersStruct, start, **job)
