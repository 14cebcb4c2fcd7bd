"""The bytes behind a tensor."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes from which large pages are asked for
_LARGE_PAGE = 1 << 21


def memory_of(tensor: Tensor) -> Any:
    """The bytes of a tensor as a buffer, not copied: valid only as long as the tensor is there.

    Not by way of numpy, which a program that only wants the layer need not have.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor in main memory can be read as bytes")
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b""


def large_zeros(rows: int, columns: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Zeros (rows, columns) for a table whose rows are read in any order.

    The system is asked for large pages before the memory is first written. With pages of 4 KB,
    nearly each row of a million would have to wait for the address of its page.
    """
    table = torch.empty(rows, columns, dtype=dtype, device=device)
    if type(table) is Tensor and table.device.type == "cpu":
        _prefer_large_pages(table)
    return table.zero_()


def _prefer_large_pages(table: Tensor) -> None:
    """It is a hint: nothing depends on whether the system follows it."""
    size, advise = table.numel() * table.element_size(), _madvise()
    if advise is None or size < _LARGE:
        return
    first = -(-table.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    end = (table.data_ptr() + size) // _LARGE_PAGE * _LARGE_PAGE
    advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


@functools.lru_cache(maxsize=None)
def _madvise() -> Any:
    """The function of the C library, where the system has large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None


class HeldTable:
    """Keeps the memory of codes and values alive, and notices when a module has other ones.

    The same tensor can get other memory: `.data = ...`, `set_`. Aliases hold the first memory, so
    that no other tensor can come to lie at its address.
    """

    def __init__(self, codes: Tensor, values: Tensor, padding_idx: int | None) -> None:
        self._of_codes, self._of_values, self._padding_idx = codes, values, padding_idx
        self._codes, self._values = codes.detach(), values.detach()
        self._codes_at, self._values_at = codes.data_ptr(), values.data_ptr()

    def serves(self, codes: Tensor | None, values: Tensor | None, padding_idx: int | None) -> bool:
        """Whether it was made for these, and the tensors' memory is still the same."""
        return (
            codes is self._of_codes
            and values is self._of_values
            and codes.data_ptr() == self._codes_at
            and values.data_ptr() == self._values_at
            and padding_idx == self._padding_idx
        )
