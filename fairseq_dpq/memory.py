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
