"""Checksums of what is written: CRC-32 over the bytes of a tensor, and over its dtype and shape."""

from __future__ import annotations

import zlib
from typing import Mapping

from torch import Tensor

from fairseq_dpq.memory import memory_of

BLOCK = 1 << 20  # bytes


def text_crc32(text: str) -> int:
    """The CRC-32 of a text."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def tensor_crc32(tensor: Tensor) -> int:
    """The CRC-32 of a tensor: first its dtype and shape as text, then its bytes."""
    rows = tensor.detach().cpu().contiguous()  # kept by name while its memory is read
    return zlib.crc32(memory_of(rows), text_crc32(f"{tensor.dtype} {tuple(tensor.shape)}"))


def blocks_crc32(tensor: Tensor) -> list[int]:
    """The CRC-32 of each BLOCK bytes of a tensor, so that rows can be checked as they are read."""
    rows = tensor.detach().cpu().contiguous()
    return [block_crc32(rows, block) for block in range(count_blocks(rows))]


def count_blocks(tensor: Tensor) -> int:
    """The number of blocks of a tensor: at least one."""
    return max(1, -(-tensor.numel() * tensor.element_size() // BLOCK))


def block_crc32(tensor: Tensor, block: int) -> int:
    """The CRC-32 of a block of a contiguous tensor: dtype, shape and place, then its bytes."""
    part = memoryview(memory_of(tensor)).cast("B")[block * BLOCK : (block + 1) * BLOCK]
    return zlib.crc32(part, text_crc32(f"{tensor.dtype} {tuple(tensor.shape)} {block}"))


def tensors_crc32(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksum of each tensor by its name."""
    return {name: tensor_crc32(tensor) for name, tensor in sorted(tensors.items())}
