"""The bytes behind a tensor, and their checksum."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import zlib
from typing import Any, Hashable, Mapping

import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes from which large pages are asked for


def memory_of(tensor: Tensor) -> Any:
    """The bytes of a tensor as a buffer, not copied: valid only as long as the tensor is there.

    Not by way of numpy, which a program that only wants the layer need not have.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor in main memory can be read as bytes")
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b""


def identity(tensor: Tensor) -> Hashable:
    """The same for tensors that share their numbers, as objects or as memory."""
    if tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def text_crc32(text: str) -> int:
    """The CRC-32 of a text."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def tensor_crc32(tensor: Tensor) -> int:
    """The CRC-32 of a tensor: first its dtype and shape as text, then its bytes."""
    rows = tensor.detach().cpu().contiguous()  # kept by name while its memory is read
    return zlib.crc32(memory_of(rows), text_crc32(f"{tensor.dtype} {tuple(tensor.shape)}"))


def tensors_crc32(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksum of each tensor by its name."""
    return {name: tensor_crc32(tensor) for name, tensor in sorted(tensors.items())}


def check_crc32(tensors: Mapping[str, Tensor], checksums: Mapping[str, Any]) -> None:
    """Raise ValueError unless these are the tensors that the checksums were made of."""
    if set(tensors) != set(checksums):
        raise ValueError("the checksums are not those of its tensors")
    for name, tensor in tensors.items():
        if tensor_crc32(tensor) != checksums[name]:
            raise ValueError(f"{name} does not match its checksum: the file is damaged")


def large_zeros(rows: int, columns: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Zeros (rows, columns) for a table whose rows are read in any order.

    The system is asked for large pages. With pages of 4 KB, nearly each row of a million would have
    to wait for the address of its page. Memory is taken as it is written.
    """
    probe = torch.empty(0, dtype=dtype, device=device)
    size = rows * columns * probe.element_size()
    plain = type(probe) is Tensor and probe.device.type == "cpu"
    if size < _LARGE or not plain or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


class BufferGuard:
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
