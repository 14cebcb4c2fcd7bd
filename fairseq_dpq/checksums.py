"""Checksums of what is written: CRC-32 over the bytes of a tensor, and over its dtype and shape."""

from __future__ import annotations

import zlib
from typing import Mapping

from torch import Tensor

from fairseq_dpq.memory import memory_of


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
