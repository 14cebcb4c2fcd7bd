"""Codes, gradients, k-means and packing by the library; each function returns None where PyTorch
must serve.

The library trusts pointers and sizes, so every function checks the shape, dtype, layout and device
of each argument at every call. Shapes that do not fit each other are a ValueError.
"""

from __future__ import annotations

import ctypes
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from fairseq_dpq.native import library
from fairseq_dpq.native.buffers import CPU, MOST_CODES, aligned, has_memory
from fairseq_dpq.tracing import is_tracing

BYTES = {torch.uint8: 1, torch.int16: 2, torch.int64: 8}  # of a code
_DISTANCE = {"dot": 0, "euclidean": 1}
_WIDEST = 15  # bits of a code
_ROWS = 1 << 15  # rows turned into float32 at once where they are of another type


def serves(*tensors: Tensor | None) -> Any:
    """The library, if it can take these tensors."""
    plain = all(t is None or (t.device == CPU and has_memory(t)) for t in tensors)
    return library.load() if plain and not is_tracing() else None


def expect(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError if a tensor has none of these shapes."""
    if tensor.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {wanted}")


def dims(name: str, tensor: Tensor, names: str) -> tuple[int, ...]:
    """The sizes of a tensor that has one dimension for each of the names."""
    if tensor.dim() != names.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be ({names})")
    return tuple(tensor.shape)


def call(function: Any, struct: Any, start: int = 0, **fields: Any) -> None:
    """Call a function of the library with a struct of these fields, tensors by their addresses. An
    error counts rows from `start` on."""
    # The struct and the tensors have names here, so that they live as long as the call.
    job = struct(**{k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in fields.items()})
    code = function(ctypes.addressof(job), torch.get_num_threads())
    if code > 0:
        row = start + code - 1
        raise ValueError(f"codes: row {row} has a code that is not below K={fields['K']}")
    passed(code)


def passed(code: int) -> None:
    """Raise an error unless a call of the library returned 0."""
    if code == library.NO_MEMORY:
        raise MemoryError("the native library has no memory left")
    if code:
        raise ValueError("the native library refuses these shapes")


def _check_query(query: Tensor, keys: Tensor, mean: Tensor | None, scale: Tensor | None) -> None:
    """Raise ValueError where queries, keys and statistics do not fit each other."""
    _, D, size = dims("query", query, "tokens, D, d_key")
    _, K, _ = dims("keys", keys, "G, K, d_key")
    expect("keys", keys, (D, K, size), (1, K, size))
    if not K:
        raise ValueError("keys has K=0; a code needs at least one key")
    if (mean is None) != (scale is None):
        raise ValueError("mean and scale go together: give both or neither")
    if mean is not None and scale is not None:
        expect("mean", mean, (D, K), (1, K))
        expect("scale", scale, tuple(mean.shape))
    for name, tensor in (("query", query), ("keys", keys), ("mean", mean), ("scale", scale)):
        if tensor is not None and tensor.is_complex():
            raise ValueError(f"{name} is complex; codes are those of real numbers")


@torch.no_grad()
def codes(
    query: Tensor,
    keys: Tensor,
    distance: str,
    mean: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor | None:
    """Codes (tokens, D), int64, of queries (tokens, D, d_key), bit for bit as they are defined.

    `mean` and `scale` (G, K) normalise the responses: (response - mean) * scale.
    """
    lib = serves(query, keys, mean, scale)
    _check_query(query, keys, mean, scale)
    if distance not in _DISTANCE:
        raise ValueError(f"distance {distance!r}: choose one of {', '.join(_DISTANCE)}")
    if query.is_cuda:
        kernels = None if is_tracing() else library.gpu(query.device)
        others = [t for t in (keys, mean, scale) if t is not None]
        if kernels is None or any(t.device != query.device for t in others):
            return None
        return kernels.codes(query, keys, distance == "euclidean", mean, scale)
    (tokens, D, size), (G, K, _) = query.shape, keys.shape
    if lib is None or K > MOST_CODES or not size or not D:
        return None
    query, keys = query.float(), aligned(keys.float())
    # Rows may be apart from each other, as those of a slice of a wider table.
    inside = query.stride(2) == 1 and query.stride(1) == size and query.stride(0) >= D * size
    if not inside or query.data_ptr() % 4:
        query = aligned(query)
    mean, scale = (None if t is None else aligned(t.float()) for t in (mean, scale))
    out = query.new_empty(tokens, D, dtype=torch.int64)
    job: dict[str, Any] = {"query": query, "keys": keys, "mean": mean, "scale": scale, "out": out}
    job.update(tokens=tokens, D=D, key_dim=size, G=G, K=K, distance=_DISTANCE[distance])
    job.update(stride=query.stride(0) if tokens > 1 else D * size, out_bytes=8)
    job.update(stat_groups=0 if mean is None else mean.shape[0])
    call(lib.dpq_codes, library.QueryStruct, **job)
    return out


def takes_gradients(*parts: Tensor) -> bool:
    """Whether `softmax_gradients` serves queries, keys and values like these."""
    return serves(*parts) is not None and all(t.dtype is torch.float32 for t in parts)


@torch.no_grad()
def softmax_gradients(
    features: Tensor,
    direction: Tensor,
    offset: Tensor,
    values: Tensor,
    codes: Tensor,
    grad: Tensor,
    of_keys: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor] | None:
    """Gradients of features (rows, D, m), direction (G, K, m), offset (G, K) and values
    (G, K, size), where `grad` (rows, D, size) is that of the rows picked by `codes` (rows, D).
    Without `of_keys`, which takes time, there are none of direction and offset."""
    parts = (features, direction, offset, values, grad)
    lib = serves(*parts, codes)
    rows, D, m = dims("features", features, "rows, D, m")
    _, K, size = dims("values", values, "G, K, size")
    expect("values", values, (D, K, size), (1, K, size))
    G = values.shape[0]
    expect("direction", direction, (G, K, m))
    expect("offset", offset, (G, K))
    expect("codes", codes, (rows, D))
    expect("grad", grad, (rows, D, size))
    if lib is None or any(t.dtype is not torch.float32 for t in parts):
        return None
    if K > MOST_CODES or codes.dtype is not torch.int64 or not (D and K and m and size):
        return None
    names = ("features", "direction", "offset", "values", "grad", "codes")
    job: dict[str, Any] = {k: aligned(t) for k, t in zip(names, (*parts, codes))}
    wanted = names[:4] if of_keys else ("features", "values")
    found = {name: torch.empty_like(job[name]) for name in wanted}
    job.update({f"grad_{name}": out for name, out in found.items()})
    job.update(rows=rows, stride=D * m, D=D, features_size=m, G=G, K=K, size=size)
    call(lib.dpq_softmax_gradients, library.SoftmaxStruct, **job)
    return tuple(found.get(name) for name in names[:4])  # type: ignore[return-value]


def pack(codes: Tensor, bits: Sequence[int], row_bytes: int) -> Tensor | None:
    """Codes (n, D) as bits (n, row_bytes)."""
    lib = serves(codes)
    n, D = dims("codes", codes, "n, D")
    _check_bits(bits, row_bytes)
    if len(bits) != D:
        raise ValueError(f"bits has {len(bits)} widths for {D} groups; give one for each group")
    if lib is None or codes.dtype not in BYTES or not D or max(bits) > _WIDEST:
        return None
    codes = aligned(codes)
    out = codes.new_empty(n, row_bytes, dtype=torch.uint8)
    widths = (ctypes.c_uint8 * D)(*bits)
    rows = (codes.data_ptr(), BYTES[codes.dtype], n, D, ctypes.addressof(widths), row_bytes)
    passed(lib.dpq_pack(*rows, out.data_ptr(), torch.get_num_threads()))
    return out


def unpack(packed: Tensor, bits: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Packed bits (n, row_bytes) as codes (n, D) of `dtype`."""
    lib = serves(packed)
    n, row_bytes = dims("packed", packed, "n, row_bytes")
    _check_bits(bits, row_bytes)
    D = len(bits)
    if lib is None or dtype not in BYTES or packed.dtype is not torch.uint8:
        return None
    if not D or max(bits) > _WIDEST:
        return None
    if dtype is torch.uint8 and max(bits) > 8:
        raise ValueError(f"codes of {max(bits)} bits do not fit into one byte; ask for torch.int16")
    packed = packed.contiguous()
    out = packed.new_empty(n, D, dtype=dtype)
    widths = (ctypes.c_uint8 * D)(*bits)
    rows = (packed.data_ptr(), n, D, ctypes.addressof(widths), row_bytes)
    passed(lib.dpq_unpack(*rows, out.data_ptr(), BYTES[dtype], torch.get_num_threads()))
    return out


def _check_bits(bits: Sequence[int], row_bytes: int) -> None:
    if min(bits, default=0) < 0:
        raise ValueError(f"bits has a width of {min(bits)}; widths begin at 0")
    if 8 * row_bytes < sum(bits):
        raise ValueError(f"rows of {row_bytes} bytes cannot hold {sum(bits)} bits")


# K-means: points (n, D, size) may be a view of a table (n, d), `table.view(n, D, -1)`, which is not
# copied. Each group has its own centroids (D, K, size), or all share (1, K, size).


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
