"""Memory of large tables: zeros, in large pages where the system has them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

from fairseq_dpq import CompactEmbedding
from fairseq_dpq.files.memory import large_zeros, memory_of

SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> list[str]:
    """The flags of the mapping that an address belongs to."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping has this address")


@pytest.mark.parametrize("rows", [0, 3, 1 << 17])
def test_zeros(rows: int) -> None:
    for dtype in (torch.uint8, torch.int16):
        table = large_zeros(rows, 128, dtype, None)
        assert table.shape == (rows, 128) and table.dtype == dtype and not table.any()
        assert table.is_contiguous() and len(memory_of(table)) == rows * 128 * table.element_size()
    assert large_zeros(2, 3, torch.uint8, "meta").is_meta


@pytest.mark.skipif(not SMAPS.exists(), reason="this system does not list its mappings")
def test_the_codes_of_a_large_table_ask_for_large_pages() -> None:
    # A small table lies in the heap, for which other libraries may have asked the same.
    codes = CompactEmbedding(1 << 17, 256, K=32, D=128).codes
    assert "hg" in flags_at(codes.data_ptr() + (8 << 20))


def test_a_large_table_is_copied_pickled_and_shared_as_any_other() -> None:
    table = large_zeros(1 << 16, 128, torch.uint8, None)
    table[5] = 7
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table)), table.share_memory_()):
        assert twin[5].sum() == 7 * 128 and twin.sum() == 7 * 128
    table[6] = 1
    assert table.sum() == 8 * 128
