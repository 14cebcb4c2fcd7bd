"""The library's lookup, logits and codes as Triton kernels, for tensors on a GPU.

They serve where FAIRSEQ_DPQ_TRITON=1 and triton is installed. Nobody has run them on a GPU yet, so
PyTorch's operators are the default there; `python benchmarks/gpu.py` compares both with the CPU.
TRITON_INTERPRET=1 runs the kernels on a CPU, step by step: the tests do. An index or a code out of
range fails an assertion on the device, as in nn.Embedding, and reads nothing outside of the table.
"""

from __future__ import annotations

import itertools
from typing import Any, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_dpq.files.memory import BufferGuard
from fairseq_dpq.native.buffers import Buffers, products

_BLOCK = 1024  # numbers of a row that one program of the lookup copies, at most
_ROWS = 64  # rows of the table in one program of the logits
_LANES = 16  # rows of h in one program of the logits
_TOKENS, _KEYS = 64, 32  # queries and keys in one step of the codes


@triton.jit
def _code(codes, row, j, start, top, row_bytes, packed: tl.constexpr, mask):
    """The codes of groups j of rows of the table, 0 where the mask is not set."""
    if packed:
        bit = tl.load(start + j, mask, 0)
        at = row * row_bytes + bit // 8
        last = row * row_bytes + row_bytes - 1
        word = tl.load(codes + at, mask, 0).to(tl.int32)
        word |= tl.load(codes + at + 1, mask & (at + 1 <= last), 0).to(tl.int32) << 8
        word |= tl.load(codes + at + 2, mask & (at + 2 <= last), 0).to(tl.int32) << 16
        width = tl.load(start + j + 1, mask, 0) - bit
        code = (word >> (bit % 8)) & ((1 << width) - 1)
    else:
        code = tl.load(codes + row * row_bytes + j, mask, 0).to(tl.int32)
    good = code <= tl.load(top + j, mask, 0)
    tl.device_assert((good & (code >= 0)) | ~mask, "a code that its group does not have")
    return tl.where(good & (code >= 0), code, 0)


@triton.jit(debug=True)
def _lookup(
    codes, values, first, start, top, indices, out, n, d, row_bytes, padding,
    size: tl.constexpr, packed: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program: a stretch of the row of one index."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + token).to(tl.int64)
    known = (index >= 0) & (index < n)
    tl.device_assert(known, "index out of range")
    at = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.where(known, index, 0) + tl.zeros((block,), tl.int64)
    mask = at < d
    j = at // size
    wanted = mask & (row != padding)
    code = _code(codes, row, j, start, top, row_bytes, packed, wanted)
    value = (tl.load(first + j, wanted, 0) + code).to(tl.int64)
    found = tl.load(values + value * size + at % size, wanted, 0.0)
    tl.store(out + token * d + at, found, mask)


@triton.jit(debug=True)
def _logits(
    codes, partial, place, start, top, out, n, batch, D, row_bytes, padding,
    packed: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """One program: the logits of some rows of the table and some rows of h, group after group."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    lane = tl.program_id(1) * lanes + tl.arange(0, lanes)
    wanted = (row < n) & (row != padding)
    there = wanted[:, None] & (lane < batch)[None, :]
    total = tl.zeros((rows, lanes), tl.float32)
    for j in range(D):
        code = _code(codes, row, j + tl.zeros_like(row), start, top, row_bytes, packed, wanted)
        at = (tl.load(place + j) + code).to(tl.int64) * batch
        total += tl.load(partial + at[:, None] + lane[None, :], there, 0.0)
    kept = (row < n)[:, None] & (lane < batch)[None, :]
    tl.store(out + lane[None, :].to(tl.int64) * n + row[:, None], total, kept)


@triton.jit
def _codes(
    query, keys, mean, scale, out, tokens, D, K, key_jump, stat_jump,
    size: tl.constexpr, euclidean: tl.constexpr, normalized: tl.constexpr,
    some: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """One program: the codes of some queries in one group. Sums go over one dimension after the
    other, without fused multiply-add: that order defines a code."""
    token = tl.program_id(0).to(tl.int64) * some + tl.arange(0, some)
    j = tl.program_id(1)
    mask = token < tokens
    rows = query + (token * D + j) * size
    best = tl.full((some,), float("-inf"), tl.float32)
    code = tl.zeros((some,), tl.int32)
    nan = tl.full((some,), 1 << 30, tl.int32)  # the first key whose response is NaN
    for from_key in range(0, K, at_once):
        k = from_key + tl.arange(0, at_once)
        real = k < K
        at = keys + (j * key_jump + k) * size
        total = tl.zeros((some, at_once), tl.float32)
        for i in range(size):
            q = tl.load(rows + i, mask, 0.0)[:, None]
            v = tl.load(at + i, real, 0.0)[None, :]
            total += -((q - v) * (q - v)) if euclidean else q * v
        if normalized:
            m = tl.load(mean + j * stat_jump + k, real, 0.0)[None, :]
            total = (total - m) * tl.load(scale + j * stat_jump + k, real, 0.0)[None, :]
        number = k[None, :] + tl.zeros((some, at_once), tl.int32)
        wrong = (total != total) & real[None, :]
        nan = tl.minimum(nan, tl.min(tl.where(wrong, number, 1 << 30), 1))
        total = tl.where(real[None, :] & (total == total), total, float("-inf"))
        top = tl.max(total, 1)
        where = tl.min(tl.where((total == top[:, None]) & real[None, :], number, 1 << 30), 1)
        code = tl.where(top > best, where, code)
        best = tl.maximum(top, best)
    tl.store(out + token * D + j, tl.where(nan < (1 << 30), nan, code), mask)


class GpuTable(BufferGuard):
    """What `native.Table` is, by the kernels of this file."""

    def __init__(self, buffers: Buffers) -> None:
        codes, values, sizes, shared, packed, padding_idx = self._buffers = buffers
        super().__init__(codes, values, padding_idx)
        self.n, self.D, self.size = codes.shape[0], len(sizes), values.shape[1]
        self.d = self.D * self.size
        self._packed = packed
        self._padding = -1 if padding_idx is None else padding_idx
        place = [0, *itertools.accumulate(sizes)][: self.D]
        self._first = _numbers([0] * self.D if shared else place, codes.device)
        self._place = _numbers(place, codes.device)
        self._start = _numbers([0, *itertools.accumulate(buffers.bits)], codes.device)
        self._top = _numbers([s - 1 for s in sizes], codes.device)

    def lookup(self, indices: Tensor) -> Tensor | None:
        """The rows of indices of any shape; None where PyTorch must serve."""
        if indices.dtype not in (torch.int32, torch.int64) or not self._takes(indices):
            return None
        flat = indices.reshape(-1).contiguous()
        out = self._values.new_empty(flat.numel(), self.d)
        block = min(_BLOCK, triton.next_power_of_2(self.d))
        if flat.numel():
            _lookup[(flat.numel(), triton.cdiv(self.d, block))](
                self._codes, self._values, self._first, self._start, self._top, flat, out,
                self.n, self.d, self._codes.shape[1], self._padding,
                size=self.size, packed=self._packed, block=block,
            )  # fmt: skip
        return out.view(*indices.shape, self.d)

    def logits(self, h: Tensor) -> Tensor | None:
        """h (..., d) times the transposed table, in h's dtype, summed in float32, or None."""
        wants_gradient = h.requires_grad and torch.is_grad_enabled()
        if not h.dim() or h.shape[-1] != self.d or h.dtype is torch.float64 or wants_gradient:
            return None
        if not self._takes(h):
            return None
        rows = h.detach().reshape(-1, self.D, self.size).float()
        values = self._values[: self._buffers.value_rows]
        partial = products(rows, values, self._buffers.sizes, self._buffers.shared)
        batch = partial.shape[1]
        out = partial.new_empty(batch, self.n)
        if out.numel():
            lanes = min(_LANES, triton.next_power_of_2(batch))
            _logits[(triton.cdiv(self.n, _ROWS), triton.cdiv(batch, lanes))](
                self._codes, partial, self._place, self._start, self._top, out,
                self.n, batch, self.D, self._codes.shape[1], self._padding,
                packed=self._packed, rows=_ROWS, lanes=lanes,
            )  # fmt: skip
        return out.view(*h.shape[:-1], self.n).to(h.dtype)

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.device == self._codes.device and not self._of_values.requires_grad


@torch.no_grad()
def codes(
    query: Tensor,
    keys: Tensor,
    euclidean: bool,
    mean: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Codes (tokens, D) of queries (tokens, D, d_key), bit for bit as they are defined."""
    tokens, D, size = query.shape
    G, K, _ = keys.shape
    query, keys = query.float().contiguous(), keys.float().contiguous()
    normalized = mean is not None and scale is not None
    # Without statistics the kernel gets any tensor in their place, and does not read it.
    mean = keys if mean is None else mean.float().contiguous()
    scale = keys if scale is None else scale.float().contiguous()
    out = torch.empty(tokens, D, dtype=torch.int64, device=query.device)
    if out.numel():
        _codes[(triton.cdiv(tokens, _TOKENS), D)](
            query, keys, mean, scale, out, tokens, D, K,
            K if G > 1 else 0, K if normalized and mean.shape[0] > 1 else 0,
            size=size, euclidean=euclidean, normalized=normalized,
            some=_TOKENS, at_once=_KEYS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def check(device: Any) -> None:
    """Raise an error where Triton cannot compile or run a kernel on the device."""
    codes = torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8, device=device)
    values = torch.arange(8.0, device=device).view(4, 2)
    table = GpuTable(Buffers(codes, values, [2, 2], False, False, None))
    found = table.lookup(torch.tensor([1, 0], device=device))
    if found is None or found.tolist() != [[2, 3, 4, 5], [0, 1, 6, 7]]:
        raise RuntimeError("a Triton kernel gives wrong rows")


def _numbers(numbers: Sequence[int], device: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
