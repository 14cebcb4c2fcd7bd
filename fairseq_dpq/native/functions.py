"""Codes, packing and unpacking by the library; each returns None where PyTorch must serve."""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

import torch
from torch import Tensor

from fairseq_dpq.native import library
from fairseq_dpq.native.table import aligned
from fairseq_dpq.tracing import is_tracing

_DISTANCE = {"dot": 0, "euclidean": 1, "cosine": 2}
_BYTES = {torch.uint8: 1, torch.int16: 2, torch.int64: 8}
_MOST_CODES = 32768


def _serves(*tensors: Tensor) -> Any:
    """The library, if it can take these tensors."""
    plain = all(t.is_cpu and type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    return library.load() if plain and not is_tracing() else None


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
    lib = _serves(query, keys)
    tokens, D, size = query.shape
    G, K, _ = keys.shape
    if lib is None or K > _MOST_CODES or dtype not in _BYTES or G not in (1, D) or not size:
        return None
    if dtype is torch.uint8 and K > 256:
        raise ValueError(f"codes of K={K} do not fit into one byte; ask for torch.int16")
    query, keys = query.float(), aligned(keys.float())
    # Rows may be apart from each other, as those of a slice of a wider table.
    inside = query.stride(2) == 1 and query.stride(1) == size and query.stride(0) >= D * size
    if not inside or query.data_ptr() % 4:
        query = query.contiguous().clone() if query.data_ptr() % 4 else query.contiguous()
    out = torch.empty(tokens, D, dtype=dtype)
    job = library.QueryStruct(
        query=query.data_ptr(),
        keys=keys.data_ptr(),
        out=out.data_ptr(),
        tokens=tokens,
        stride=query.stride(0) if tokens > 1 else D * size,
        D=D,
        key_dim=size,
        G=G,
        K=K,
        distance=_DISTANCE[distance],
        out_bytes=_BYTES[dtype],
    )
    if mean is not None and scale is not None:
        mean, scale = aligned(mean.float()), aligned(scale.float())
        if mean.shape != scale.shape or mean.shape not in ((1, K), (D, K)):
            raise ValueError(f"statistics of shape {tuple(mean.shape)} do not fit {G} x {K} keys")
        job.mean, job.scale, job.stat_groups = mean.data_ptr(), scale.data_ptr(), mean.shape[0]
    _check(lib.dpq_codes(ctypes.addressof(job), torch.get_num_threads()))
    return out


def takes_gradients(*parts: Tensor) -> bool:
    """Whether `softmax_gradients` serves queries, keys and values like these."""
    return _serves(*parts) is not None and all(t.dtype is torch.float32 for t in parts)


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
    lib = _serves(*parts, codes)
    if lib is None or any(t.dtype is not torch.float32 for t in parts):
        return None
    (rows, D, m), (G, K, size) = features.shape, values.shape
    if K > _MOST_CODES or G not in (1, D) or codes.dtype is not torch.int64:
        return None
    if direction.shape != (G, K, m) or grad.shape != (rows, D, size) or codes.shape != (rows, D):
        raise ValueError("the shapes of a softmax's gradient do not fit each other")
    features, direction, offset, values, grad = (aligned(t) for t in parts)
    codes = aligned(codes)
    out = [torch.empty_like(t) for t in (features, values)]
    to_keys = [torch.empty_like(t) for t in (direction, offset)] if of_keys else [None, None]
    job = library.SoftmaxStruct(
        features=features.data_ptr(),
        direction=direction.data_ptr(),
        offset=offset.data_ptr(),
        values=values.data_ptr(),
        codes=codes.data_ptr(),
        grad=grad.data_ptr(),
        grad_features=out[0].data_ptr(),
        grad_direction=None if to_keys[0] is None else to_keys[0].data_ptr(),
        grad_offset=None if to_keys[1] is None else to_keys[1].data_ptr(),
        grad_values=out[1].data_ptr(),
        rows=rows,
        stride=D * m,
        D=D,
        features_size=m,
        G=G,
        K=K,
        size=size,
    )
    _check(lib.dpq_softmax_gradients(ctypes.addressof(job), torch.get_num_threads()))
    return out[0], *to_keys, out[1]  # type: ignore[return-value]


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
    query, keys = distance.ordered_rows(query.float()), distance.ordered_rows(keys.float())
    return kernels.codes(query, keys, distance.name == "euclidean", mean, scale)


def pack(codes: Tensor, bits: Sequence[int], row_bytes: int) -> Tensor | None:
    """Codes (n, D) as bits (n, row_bytes)."""
    lib = _serves(codes)
    n, D = codes.shape
    if lib is None or codes.dtype not in _BYTES or not D or max(bits) > 15 or len(bits) != D:
        return None
    codes = aligned(codes)
    out = torch.empty(n, row_bytes, dtype=torch.uint8)
    widths = (ctypes.c_uint8 * D)(*bits)
    _check(
        lib.dpq_pack(
            codes.data_ptr(),
            _BYTES[codes.dtype],
            n,
            D,
            ctypes.addressof(widths),
            row_bytes,
            out.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return out


def unpack(packed: Tensor, bits: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Packed bits (n, row_bytes) as codes (n, D) of `dtype`."""
    lib = _serves(packed)
    n, D = packed.shape[0], len(bits)
    if lib is None or dtype not in _BYTES or packed.dtype is not torch.uint8 or not D:
        return None
    if max(bits) > 15:
        return None
    packed = packed.contiguous()
    out = torch.empty(n, D, dtype=dtype)
    widths = (ctypes.c_uint8 * D)(*bits)
    _check(
        lib.dpq_unpack(
            packed.data_ptr(),
            n,
            D,
            ctypes.addressof(widths),
            packed.shape[1],
            out.data_ptr(),
            _BYTES[dtype],
            torch.get_num_threads(),
        )
    )
    return out


def _check(code: int) -> None:
    if code == library.NO_MEMORY:
        raise MemoryError("the native library has no memory left")
    if code:
        raise ValueError("the native library refuses these shapes")
