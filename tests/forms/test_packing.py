"""Codes to bits and back: a layout worked by hand, and random tables of all bit widths."""

from __future__ import annotations

import random

import pytest
import torch

from fairseq_dpq.forms import packing
from fairseq_dpq.forms.packing import (
    code_bits,
    code_dtype,
    even_width,
    is_wide,
    pack_codes,
    row_bytes,
    unpack_codes,
    unpack_even,
    unpack_plan,
    unpack_rows,
)


def bits_by_hand(codes: list, bits: list) -> list:
    """One row as bytes, by Python integers: group j's bits follow those of group j - 1."""
    number, position = 0, 0
    for code, b in zip(codes, bits):
        number |= code << position
        position += b
    return list(number.to_bytes(max(1, (position + 7) // 8), "little"))


def test_layout_by_hand() -> None:
    # 5 = 101, 3 = 011, 6 = 110, lowest bit first: 10111001 1 -> 0b10011101, 0b1
    packed = pack_codes(torch.tensor([[5, 3, 6]]), [3, 3, 3])
    assert packed.tolist() == [[0b10011101, 0b1]]
    assert packed.dtype == torch.uint8


@pytest.mark.parametrize(
    "K,bits", [(2, 1), (3, 2), (4, 2), (5, 3), (12, 4), (100, 7), (256, 8), (300, 9), (32768, 15)]
)
def test_code_bits(K: int, bits: int) -> None:
    assert code_bits(K) == bits
    assert code_dtype(K) == (torch.uint8 if K <= 256 else torch.int16)
    codes = torch.tensor([[0, K - 1, K // 2]], dtype=code_dtype(K))
    assert torch.equal(unpack_codes(pack_codes(codes, [bits] * 3), [bits] * 3, codes.dtype), codes)


def test_random_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CHUNK_BITS", 4096)  # so that tables are packed in many chunks
    rng = random.Random(0)
    for trial in range(150):
        D, n = rng.randint(1, 40), rng.randint(1, 60)
        widest = rng.choice([1, 2, 3, 5, 7, 8, 9, 10, 15])
        narrowest = 0 if trial % 2 else widest  # groups of their own widths, some of no bits
        bits = [rng.randint(narrowest, widest) for _ in range(D)]
        codes = [[rng.randrange(1 << b) for b in bits] for _ in range(n)]
        codes[0] = [(1 << b) - 1 for b in bits]
        dtype = code_dtype(1 << max(bits))
        packed = pack_codes(torch.tensor(codes, dtype=dtype), bits)
        assert packed.tolist() == [bits_by_hand(row, bits) for row in codes], bits
        assert packed.shape == (n, row_bytes(bits))
        assert unpack_codes(packed, bits, dtype).tolist() == codes, bits
        # some rows alone, as a lookup does
        rows = torch.tensor([n - 1, 0, n // 2])
        found = unpack_rows(packed[rows], unpack_plan(bits), is_wide(bits))
        assert found.dtype == torch.int32
        assert found.tolist() == [codes[i] for i in rows.tolist()], bits
        assert even_width(bits) == (bits[0] if len(set(bits)) == 1 and 1 <= bits[0] <= 8 else 0)
        if even_width(bits):
            assert torch.equal(unpack_even(packed[rows], even_width(bits), D), found.long()), bits


def test_groups_of_one_code_take_no_bits_but_a_row_takes_a_byte() -> None:
    assert row_bytes([0, 0, 5]) == 1 and row_bytes([0, 4, 5]) == 2
    assert row_bytes([0, 0]) == 1
    packed = pack_codes(torch.zeros(3, 2, dtype=torch.uint8), [0, 0])
    assert packed.tolist() == [[0]] * 3
    assert unpack_codes(packed, [0, 0], torch.uint8).tolist() == [[0, 0]] * 3


def test_wrong_number_of_widths() -> None:
    with pytest.raises(ValueError, match="2 bit widths for 3 groups; give one for each group"):
        pack_codes(torch.zeros(1, 3), [1, 1])
