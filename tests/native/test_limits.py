"""The native library at its limits: more than 2^31 elements, no rows, memory at odd addresses,
shapes that cannot be, and the memory that logits take."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_dpq import CodesLinear, CompactEmbedding, native
from fairseq_dpq.native import library
from helpers.native_cases import by_pytorch, table_of

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def at_odd_address(tensor: Tensor) -> Tensor:
    """A copy of a tensor whose memory begins at an odd address."""
    store = bytearray(tensor.numel() * tensor.element_size() + 1)
    store[1:] = tensor.numpy().tobytes()
    moved = torch.frombuffer(store, dtype=tensor.dtype, offset=1).view(tensor.shape)
    assert moved.data_ptr() % 2
    return moved


@pytest.mark.skipif(sys.platform != "linux", reason="takes memory that is never written for free")
@pytest.mark.parametrize("packed", [False, True])
def test_more_than_two_to_the_31_codes(packed: bool) -> None:
    n = (1 << 31) + 64
    codes = torch.empty(n, 1, dtype=torch.uint8)  # only the pages of a few rows are ever there
    rows = torch.tensor([5, (1 << 31) - 1, 1 << 31, n - 2, n - 1])
    codes[rows, 0] = torch.tensor([7, 8, 9, 10, 11], dtype=torch.uint8)
    values = torch.randn(257, 4)
    values[256] = 0
    table = native.table(native.Buffers(codes, values, [256], False, packed, n - 2))
    found = table.lookup(rows)
    assert torch.equal(found, values[[7, 8, 9, 256, 11]])
    for bad in (n, -1):
        with pytest.raises(IndexError, match=f"index {bad} is out of range"):
            table.lookup(torch.tensor([0, bad]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("K,dtype", [(12, torch.float32), (300, torch.float16)])
def test_tables_at_odd_addresses(K: int, dtype: torch.dtype, packed: bool) -> None:
    torch.manual_seed(0)
    codes, values = torch.randint(K, (50, 8)), torch.randn(8, K, 4).to(dtype)
    form = CompactEmbedding.from_codes(codes, values, 32, 1, packed=packed)
    h, ids = torch.randn(3, 32), torch.arange(50)
    rows, logits = form(ids), CodesLinear(form)(h)
    form.codes, form.values = at_odd_address(form.codes), at_odd_address(form.values)
    table = table_of(form)
    assert torch.equal(table.lookup(ids), rows)
    assert torch.equal(table.logits(at_odd_address(h)), logits)
    assert torch.equal(table.lookup(at_odd_address(ids.int())), rows)


@pytest.mark.parametrize("packed", [False, True])
def test_no_rows(packed: bool) -> None:
    form = CompactEmbedding(0, 32, K=4, D=8, packed=packed)
    assert form.native_table() is not None
    assert form(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 32)
    assert CodesLinear(form)(torch.randn(3, 32)).shape == (3, 0)
    with pytest.raises(IndexError, match="index 0 is out of range: the table has 0 rows"):
        form(torch.tensor([0]))


def test_one_number_in_each_group() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(600, 3, 1).to(dtype)
        form = CompactEmbedding.from_codes(torch.randint(3, (20, 600)), values, 600)
        ids = torch.arange(20)
        assert form.native_table() is not None
        assert torch.equal(form(ids), by_pytorch(form, ids))


def refused(**changes: Any) -> bool:
    """Whether the library refuses a good table of 7 rows, D = 2, K = 4, with these changes."""
    codes, values = torch.zeros(7, 2, dtype=torch.uint8), torch.zeros(8, 3)
    arrays = {
        "first": (ctypes.c_int64 * 2)(*changes.pop("first", (0, 4))),
        "last": (ctypes.c_uint16 * 2)(*changes.pop("last", (3, 3))),
        "bits": (ctypes.c_uint8 * 2)(*changes.pop("bits", (2, 2))),
    }
    fields = {"n": 7, "D": 2, "row_bytes": 2, "value_rows": 8, "size": 3, "padding": -1}
    fields.update(code_bytes=1, value_type=0, codes=codes.data_ptr(), values=values.data_ptr())
    fields.update({name: ctypes.addressof(array) for name, array in arrays.items()})
    struct = library.TableStruct(**{**fields, **changes})
    return library.load().dpq_prepare(ctypes.addressof(struct)) == library.BAD_TABLE


@pytest.mark.parametrize(
    "changes",
    [
        {"n": -1},
        {"D": 0},
        {"size": 0},
        {"value_rows": 0},
        {"value_rows": 7},  # fewer than the codes of both groups
        {"row_bytes": 1},
        {"padding": 7},
        {"padding": -2},
        {"code_bytes": 3},
        {"value_type": 3},
        {"codes": 0},
        {"values": 0},
        {"first": (-1, 4)},
        {"first": (0, 5)},
        {"last": (3, 32768)},
        {"code_bytes": 0, "bits": (2, 16)},
        {"n": 1 << 62},  # rows times bytes is more than a number holds
        {"size": 1 << 62},
    ],
    ids=str,
)
def test_tables_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    assert not refused() and not refused(code_bytes=0)
    assert refused(**changes)


MEASURE = """
import sys, torch
from fairseq_dpq import CodesLinear, CompactEmbedding
def resident(name):
    return int(open("/proc/self/status").read().split(name)[1].split()[0]) * 1024
torch.set_num_threads(1)
n, rows = 100_000, int(sys.argv[1])
codes = torch.randint(32, (n, 64), dtype=torch.uint8)
output = CodesLinear(CompactEmbedding.from_codes(codes, torch.randn(64, 32, 8), 512))
h = torch.randn(rows, 512)
output(h[:, None, :][:0])
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = resident("VmRSS:")
output(h)
print(resident("VmHWM:") - before - 4 * n * rows)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks cannot be reset")
@pytest.mark.parametrize("rows", [5, 64])
def test_logits_take_less_than_a_megabyte_beside_the_output(rows: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(rows)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1_000_000
