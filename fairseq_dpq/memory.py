"""The bytes behind a tensor."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


def memory_of(tensor: Tensor) -> Any:
    """The bytes of a tensor as a buffer, not copied: valid only as long as the tensor is there.

    Not by way of numpy, which a program that only wants the layer need not have.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor in main memory can be read as bytes")
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b""


class Unchanged:
    """Notices whether two tensors are still those it was made for, with the same memory.

    It keeps both alive. The same tensor can get other memory: `.data = ...`, `set_`, `resize_`.
    """

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self._first_at, self._second_at = first.data_ptr(), second.data_ptr()
        self._first_size, self._second_size = first.numel(), second.numel()
        self._first_dtype, self._second_dtype = first.dtype, second.dtype

    def are(self, first: Tensor | None, second: Tensor | None) -> bool:
        return (
            first is self.first
            and second is self.second
            and first.data_ptr() == self._first_at
            and second.data_ptr() == self._second_at
            and first.numel() == self._first_size
            and second.numel() == self._second_size
            and first.dtype is self._first_dtype
            and second.dtype is self._second_dtype
            and first.is_contiguous()
            and second.is_contiguous()
        )
