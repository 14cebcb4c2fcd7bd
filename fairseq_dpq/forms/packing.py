"""Codes to bits and back: each row is packed on its own, so that one row can be read alone.

Within a row, codes follow each other without gaps, least significant bit first; a row is padded
to whole bytes, at least one. Group j takes bits[j] bits, 0 for a group with a single code.
"""

from __future__ import annotations

import sys
from typing import Sequence

import torch
from torch import Tensor

from fairseq_dpq import native

_CHUNK_BITS = 1 << 24  # bits (one byte each while packing) held at once


def code_bits(K: int) -> int:
    """Bits that a code out of K needs: ceil(log2 K)."""
    return (K - 1).bit_length()


def row_bytes(bits: Sequence[int]) -> int:
    """Bytes of one packed row; at least one, so that rows can be looked up and counted."""
    return max(1, (sum(bits) + 7) // 8)


def code_dtype(K: int) -> torch.dtype:
    """The smallest dtype that holds the codes 0..K-1 unpacked: one byte, or two."""
    return torch.uint8 if K <= 256 else torch.int16


def pack_codes(codes: Tensor, bits: Sequence[int]) -> Tensor:
    """Pack integer codes (n, D) into bytes (n, row_bytes(bits))."""
    n, D = codes.shape
    if len(bits) != D:
        raise ValueError(f"{len(bits)} bit widths for {D} groups; give one for each group")
    width = row_bytes(bits)
    packed = native.pack(codes, bits, width)
    if packed is not None:
        return packed
    group = [j for j, b in enumerate(bits) for _ in range(b)]
    shift = [s for b in bits for s in range(b)]
    packed = torch.zeros(n, width, dtype=torch.uint8, device=codes.device)
    if not group:
        return packed
    group_t = torch.tensor(group, device=codes.device)
    shift_t = torch.tensor(shift, dtype=torch.int16, device=codes.device)
    weight = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=codes.device)
    step = max(1, _CHUNK_BITS // (8 * width))
    for chunk, out in zip(codes.split(step), packed.split(step)):
        bit = (chunk.to(torch.int16).index_select(1, group_t) >> shift_t).bitwise_and_(1)
        bit = torch.nn.functional.pad(bit.to(torch.uint8), (0, 8 * width - len(group)))
        out.copy_((bit.view(-1, width, 8) * weight).sum(-1, dtype=torch.uint8))  # (rows, width)
    return packed


def unpack_plan(bits: Sequence[int]) -> Tensor:
    """Where each code lies in a packed row: (5, D) int32 of three byte numbers, shift and mask."""
    last = row_bytes(bits) - 1
    rows = []
    position = 0
    for b in bits:
        first = position // 8
        # A code never ends beyond its own last byte, so clamping only repeats masked-out bits.
        byte = [min(first + i, last) for i in range(3)]
        rows.append([*byte, position % 8, (1 << b) - 1])
        position += b
    return torch.tensor(rows, dtype=torch.int32).t().contiguous()


def unpack_rows(packed: Tensor, plan: Tensor, wide: bool) -> Tensor:
    """Unpack rows (rows, row_bytes) into int32 codes (rows, D); `wide` if a code spans 3 bytes."""
    word = packed.index_select(1, plan[0]).to(torch.int32)
    word = word | (packed.index_select(1, plan[1]).to(torch.int32) << 8)
    if wide:
        word = word | (packed.index_select(1, plan[2]).to(torch.int32) << 16)
    return torch.bitwise_and(torch.bitwise_right_shift(word, plan[3]), plan[4])  # ONNX has these


def even_width(bits: Sequence[int]) -> int:
    """The width that all groups have, where `unpack_even` can take it (1 to 8 bits), else 0."""
    same = len(set(bits)) == 1 and 1 <= bits[0] <= 8
    return bits[0] if same and sys.byteorder == "little" else 0


def unpack_even(packed: Tensor, width: int, D: int) -> Tensor:
    """Unpack rows whose codes all have `width` bits into int64 codes (rows, D), several times
    faster than `unpack_rows`: eight codes take `width` bytes, which are read as one number."""
    words = (D + 7) // 8
    rows = torch.nn.functional.pad(packed, [0, words * width - packed.shape[1]])
    rows = torch.nn.functional.pad(rows.view(-1, words, width), [0, 8 - width])
    shift = torch.arange(0, 8 * width, width, device=packed.device)
    codes = (rows.contiguous().view(torch.int64) >> shift) & ((1 << width) - 1)
    return codes.view(-1, words * 8)[:, :D]


def is_wide(bits: Sequence[int]) -> bool:
    """Whether some code of a packed row may touch three bytes."""
    return max(bits, default=0) > 9


def unpack_codes(packed: Tensor, bits: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unpack a whole packed table into codes (n, D) of `dtype`, in bounded memory."""
    found = native.unpack(packed, bits, dtype)
    if found is not None:
        return found
    n, D = packed.shape[0], len(bits)
    codes = torch.empty(n, D, dtype=dtype, device=packed.device)
    plan = unpack_plan(bits).to(packed.device)
    wide, even = is_wide(bits), even_width(bits)
    step = max(1, _CHUNK_BITS // (8 * D))
    for rows, out in zip(packed.split(step), codes.split(step)):
        out.copy_(unpack_even(rows, even, D) if even else unpack_rows(rows, plan, wide))
    return codes


def check_spare_bits(name: str, packed: Tensor, used: int) -> None:
    """Raise ValueError if a row has a bit set beyond the `used` ones."""
    spare = 8 * packed.shape[1] - used
    if spare and bool((packed[:, -1] >> (8 - spare)).any()):
        raise ValueError(f"{name}: bits beyond the {used} of a row are set")


def check_codes(codes: Tensor, sizes: Sequence[int], first: int = 0, name: str = "codes") -> None:
    """Raise ValueError if a code (n, D) of group j is not in [0, sizes[j]); `first` is the number
    of the first row."""
    if not codes.numel():
        return
    limit = torch.tensor(sizes, device=codes.device)
    if bool(codes.amin() >= 0) and bool((codes.amax(0) < limit).all()):
        return
    row, group = ((codes < 0) | (codes >= limit)).nonzero()[0].tolist()
    raise ValueError(
        f"{name}: row {first + row} has code {int(codes[row, group])} in group {group}, "
        f"which has {sizes[group]} codes"
    )


def check_range(name: str, packed: Tensor, sizes: Sequence[int]) -> None:
    """Raise ValueError if a packed code of group j is not below sizes[j]."""
    bits = [code_bits(size) for size in sizes]
    check_spare_bits(name, packed, sum(bits))
    if all(size == 1 << b for size, b in zip(sizes, bits)):
        return  # any bits are a code
    step = max(1, _CHUNK_BITS // (8 * len(sizes)))
    for start in range(0, len(packed), step):
        codes = unpack_codes(packed[start : start + step], bits, torch.int32)
        check_codes(codes, sizes, start, name)
