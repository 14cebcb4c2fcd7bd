"""A compact table as the library sees it: pointers and sizes, checked once and then reused."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import torch
from torch import Tensor

from fairseq_dpq.files.memory import BufferGuard
from fairseq_dpq.native import library
from fairseq_dpq.native.buffers import CPU, MOST_CODES, Buffers, aligned, has_memory
from fairseq_dpq.tracing import is_tracing

if TYPE_CHECKING:
    from fairseq_dpq.native.gpu import GpuTable

VALUE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CODE_BYTES = {torch.uint8: 1, torch.int16: 2}
_INDEX_BYTES = {torch.int64: 8, torch.int32: 4}
_SMALL = 128  # indices for which the number of threads is not even asked: one does


class Table(BufferGuard):
    """Looks rows up and computes logits from codes (n, D or packed bytes) and values.

    It keeps their memory alive, because the library reads it. The caller asks `serves` before each
    call, and does not call while torch is tracing. The methods return None where PyTorch must
    serve: a gradient is wanted, an input is on another device.
    """

    def __init__(self, buffers: Buffers) -> None:
        codes, values, sizes, shared, packed, padding_idx = buffers
        super().__init__(codes, values, padding_idx)
        lib = library.load()
        assert lib is not None
        D, size = len(sizes), values.shape[1]
        # Arrays that the C struct points at live as long as this object.
        self._groups = _groups(tuple(sizes), shared)
        arrays = {k: ctypes.addressof(x) for k, x in zip(("first", "last", "bits"), self._groups)}
        self._struct = library.TableStruct(
            codes=codes.data_ptr(),
            values=values.data_ptr(),
            n=codes.shape[0],
            D=D,
            row_bytes=codes.shape[1] * codes.element_size(),
            value_rows=values.shape[0],
            size=size,
            padding=-1 if padding_idx is None else padding_idx,
            code_bytes=0 if packed else _CODE_BYTES[codes.dtype],
            value_type=VALUE_TYPES[values.dtype],
            **arrays,
        )
        self._address = ctypes.addressof(self._struct)
        if lib.dpq_prepare(self._address):
            raise ValueError("the native library refuses this table")
        self._lookup, self._logits = lib.dpq_lookup, lib.dpq_logits
        self.n, self.d = codes.shape[0], D * size

    def lookup(self, indices: Tensor) -> Tensor | None:
        """The rows of indices of any shape."""
        if self._of_values.requires_grad:
            return None
        return _look_up(self._lookup, self._address, self._values, self.n, self.d, indices)

    def logits(self, h: Tensor) -> Tensor | None:
        """h (..., d) times the transposed table: (..., n), in h's dtype, summed in float32."""
        rows = None if self._of_values.requires_grad else _states(h, self.d)
        if rows is None:
            return None
        out = rows.new_empty((*h.shape[:-1], self.n))
        self.write_logits(rows, out, 0)
        return out.to(h.dtype)

    def write_logits(self, rows: Tensor, out: Tensor, first: int) -> None:
        """Logits of `rows`, as `_states` gives them, into the columns of `out` from `first` on."""
        batch, pitch = rows.numel() // self.d, out.shape[-1]
        if first + self.n > pitch or out.numel() != batch * pitch or not out.is_contiguous():
            raise ValueError(f"{self.n} columns from {first} on do not fit {tuple(out.shape)}")
        at, threads = out.data_ptr() + 4 * first, torch.get_num_threads()
        code = self._logits(self._address, rows.data_ptr(), batch, at, pitch, threads)
        if code:
            _raise(code, None, self.n)


class Tiers:
    """Looks rows up in several tables, each of which has the next rows of one order, and computes
    their logits. `slot` (n,) int32 is the place of each row in it, None where that is its own.
    Rows are of `dtype`: the values' own, or float32 where these are float16.

    The tables and `slot` are kept alive, because the library reads them.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        first: Sequence[int],
        slot: Tensor | None,
        padding_idx: int | None,
        dtype: torch.dtype,
    ) -> None:
        lib = library.load()
        assert lib is not None
        rows = [table.n for table in tables]
        fits = all(n in (1, end - start) for n, start, end in zip(rows, first, first[1:]))
        if len(first) != len(tables) + 1 or not fits or len({t.d for t in tables}) > 1:
            raise ValueError("these tables are not tiers of one table")
        n = first[-1]
        if slot is not None and (slot.dtype is not torch.int32 or slot.shape != (n,)):
            raise ValueError(f"slot: expected {n} numbers of type int32")
        stored = {table._values.dtype for table in tables}
        widened = stored == {torch.float16} and dtype is torch.float32
        if stored != {dtype} and not widened:
            raise ValueError(f"values of {stored} cannot be rows of {dtype}")
        self.tables, self._slot = list(tables), None if slot is None else aligned(slot)
        self._pointers = (ctypes.c_void_p * len(tables))(*[table._address for table in tables])
        self._first = (ctypes.c_int64 * len(first))(*first)
        self._struct = library.TiersStruct(
            tables=ctypes.addressof(self._pointers),
            first=ctypes.addressof(self._first),
            slot=None if self._slot is None else self._slot.data_ptr(),
            n=n,
            padding=-1 if padding_idx is None else padding_idx,
            count=len(tables),
            widened=widened,
        )
        self._address = ctypes.addressof(self._struct)
        self._lookup = lib.dpq_lookup_tiers
        self._like = torch.empty(0, dtype=dtype)
        self._guards = [(t._of_codes, t._codes_at, t._of_values, t._values_at) for t in tables]
        self.n, self.d, self.dtype = n, tables[0].d, dtype

    def serves(self, buffers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether it was made for the codes and values of these tiers, and none is in training."""
        # In one loop without a call for each: one id must not take much longer than in one table.
        for (codes, codes_at, values, values_at), own in zip(self._guards, buffers):
            if own["codes"] is not codes or own["values"] is not values or values.requires_grad:
                return False
            if codes.data_ptr() != codes_at or values.data_ptr() != values_at:
                return False
        return True

    def lookup(self, indices: Tensor) -> Tensor | None:
        """The rows of indices of any shape."""
        return _look_up(self._lookup, self._address, self._like, self.n, self.d, indices)

    def logits(self, h: Tensor) -> Tensor | None:
        """h (..., d) times the transposed table, float32, in the order of the tiers: (..., n)."""
        rows = _states(h, self.d)
        if rows is None:
            return None
        out = rows.new_empty((*h.shape[:-1], self.n))
        for table, first, end in zip(self.tables, self._first, self._first[1:]):
            if table.n == end - first:
                table.write_logits(rows, out, first)
            else:  # all its rows are one
                one = rows.new_empty((*h.shape[:-1], 1))
                table.write_logits(rows, one, 0)
                out[..., first:end] = one
        return out


def _states(h: Tensor, d: int) -> Tensor | None:
    """h (..., d) in float32 as the library reads it, or None where it cannot serve."""
    if h.dtype not in VALUE_TYPES or not h.dim() or h.shape[-1] != d or h.device != CPU:
        return None
    if (h.requires_grad and torch.is_grad_enabled()) or not has_memory(h):
        return None
    return aligned(h.detach().float())


def _look_up(
    function: Any, address: int, values: Tensor, n: int, d: int, indices: Tensor
) -> Tensor | None:
    """Rows (..., d) of a table of n in the dtype of `values`, or None where it cannot serve."""
    width = _INDEX_BYTES.get(indices.dtype)
    if width is None or type(indices) is not Tensor or indices.device != CPU:
        return None
    try:
        if not indices.is_contiguous():
            indices = indices.contiguous()
        count = indices.numel()
        shape = (count, d) if indices.dim() == 1 else (*indices.shape, d)
        out = values.new_empty(shape)
        threads = 1 if count <= _SMALL else torch.get_num_threads()
        code = function(address, indices.data_ptr(), count, width, out.data_ptr(), threads)
    except RuntimeError:  # a tensor without memory of its own, as under vmap
        return None
    if code:
        _raise(code, indices, n)
    return out


def _raise(code: int, indices: Tensor | None, n: int) -> None:
    if code == library.BAD_TABLE:
        raise ValueError("the native library refuses this call: a tensor has no memory")
    if code == library.NO_MEMORY:
        raise MemoryError("the native library has no memory for partial sums")
    if code < 0 and indices is not None:
        index = int(indices.reshape(-1)[-1 - code])
        raise IndexError(f"index {index} is out of range: the table has {n} rows")
    raise IndexError(
        f"row {code - 1} of the table has a code that its group does not have: "
        "the codes are damaged"
    )


@functools.lru_cache(maxsize=64)
def _groups(sizes: tuple[int, ...], shared: bool) -> tuple[Any, Any, Any]:
    """The first value row, the largest code and the bits of each group, as arrays of C."""
    D = len(sizes)
    first = [0] * D if shared else [0, *itertools.accumulate(sizes[:-1])]
    return (
        (ctypes.c_int64 * D)(*first),
        (ctypes.c_uint16 * D)(*[s - 1 for s in sizes]),
        (ctypes.c_uint8 * D)(*[(s - 1).bit_length() for s in sizes]),
    )


def table(buffers: Buffers) -> Table | GpuTable | None:
    """A table of these tensors, in main memory or on a GPU, or None where neither the library nor
    Triton can serve them."""
    codes, values = buffers.codes, buffers.values
    if is_tracing() or type(codes) is not Tensor or type(values) is not Tensor:
        return None
    buffers.check()
    if not all(has_memory(t) and t.is_contiguous() for t in (codes, values)):
        return None
    if codes.device != values.device or max(buffers.sizes) > MOST_CODES or not values.numel():
        return None
    if values.dtype not in VALUE_TYPES or codes.dtype not in _CODE_BYTES:
        return None
    if buffers.packed and codes.dtype is not torch.uint8:
        return None
    if codes.device == CPU:
        return Table(buffers) if library.available() else None
    kernels = library.gpu(codes.device) if codes.is_cuda else None
    return None if kernels is None else kernels.GpuTable(buffers)
