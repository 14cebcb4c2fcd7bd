"""Codes, gradients and packing by the library; each function returns None where PyTorch must serve.

The library trusts pointers and sizes, so every function checks the shape, dtype, layout and device
of each argument at every call. Shapes that do not fit each other are a ValueError.
"""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

import torch
from torch import Tensor

from fairseq_dpq.native import library
from fairseq_dpq.native.checks import BYTES, MOST_CODES, aligned, call, dims, expect, passed, serves
from fairseq_dpq.tracing import is_tracing

_DISTANCE = {"dot": 0, "euclidean": 1}
_WIDEST = 15  # bits of a code


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
    dtype: torch.dtype = torch.int64,
) -> Tensor | None:
    """Codes (tokens, D) of queries (tokens, D, d_key), bit for bit as they are defined.

    `mean` and `scale` (G, K) normalise the responses: (response - mean) * scale.
    """
    lib = serves(query, keys, mean, scale)
    _check_query(query, keys, mean, scale)
    if distance not in _DISTANCE:
        raise ValueError(f"distance {distance!r}: choose one of {', '.join(_DISTANCE)}")
    (tokens, D, size), (G, K, _) = query.shape, keys.shape
    if lib is None or K > MOST_CODES or dtype not in BYTES or not size or not D:
        return None
    if dtype is torch.uint8 and K > 256:
        raise ValueError(f"codes of K={K} do not fit into one byte; ask for torch.int16")
    query, keys = query.float(), aligned(keys.float())
    # Rows may be apart from each other, as those of a slice of a wider table.
    inside = query.stride(2) == 1 and query.stride(1) == size and query.stride(0) >= D * size
    if not inside or query.data_ptr() % 4:
        query = aligned(query)
    mean, scale = (None if t is None else aligned(t.float()) for t in (mean, scale))
    out = query.new_empty(tokens, D, dtype=dtype)
    job: dict[str, Any] = {"query": query, "keys": keys, "mean": mean, "scale": scale, "out": out}
    job.update(tokens=tokens, D=D, key_dim=size, G=G, K=K, distance=_DISTANCE[distance])
    job.update(stride=query.stride(0) if tokens > 1 else D * size, out_bytes=BYTES[dtype])
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


def gpu_codes(
    query: Tensor,
    keys: Tensor,
    distance: Any,
    mean: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor | None:
    """`codes` by Triton, of queries on a GPU; None where PyTorch must serve."""
    kernels = library.gpu(query.device) if query.is_cuda and not is_tracing() else None
    if kernels is None:
        return None
    _check_query(query, keys, mean, scale)
    if any(t is not None and t.device != query.device for t in (keys, mean, scale)):
        return None
    return kernels.codes(query.float(), keys.float(), distance.name == "euclidean", mean, scale)


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
