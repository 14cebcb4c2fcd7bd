"""The native library against PyTorch: the same bits over random cases; bad input does no harm."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_dpq import CompactEmbedding, native
from fairseq_dpq.forms.packing import pack_codes, row_bytes, unpack_codes
from fairseq_dpq.training.codes import evaluation_codes, ordered_codes
from fairseq_dpq.training.distances import DISTANCES
from helpers.native_cases import (
    DTYPES,
    by_pytorch,
    no_library,
    random_form,
    random_query,
    table_of,
)

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def small_form(packed: bool = False, K: int = 32, n: int = 7) -> CompactEmbedding:
    torch.manual_seed(0)
    codes = torch.randint(K, (n, 8))
    return CompactEmbedding.from_codes(codes, torch.randn(8, K, 4), 32, packed=packed)


@pytest.mark.parametrize("seed", range(8))
def test_lookup_has_the_bits_of_pytorch(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(150):
        form = random_form(rng)
        kind = rng.choice([torch.int32, torch.int64])
        indices = torch.randint(form.num_embeddings, (rng.choice([0, 1, 3, 50]), 2), dtype=kind)
        found = table_of(form).lookup(indices)
        assert found is not None and found.dtype == form.values.dtype
        assert torch.equal(found, by_pytorch(form, indices)), form


@pytest.mark.parametrize("seed", range(3))
def test_softmax_gradients_are_those_of_pytorch(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(60):
        D, K = rng.choice([1, 2, 5, 16]), rng.choice([1, 2, 5, 15, 16, 17, 32, 33, 300])
        m, size, rows = (
            rng.choice([1, 2, 3, 4, 8, 20]),
            rng.choice([1, 2, 4, 8, 11]),
            rng.choice([0, 1, 70]),
        )
        G = rng.choice([1, D])
        parts = (torch.randn(rows, D, m), torch.randn(G, K, m) * rng.choice([0.1, 1, 30]))
        rest = (torch.randn(G, K), torch.randn(G, K, size), torch.randint(K, (rows, D)))
        inputs = (*parts, *rest, torch.randn(rows, D, size))
        found = native.softmax_gradients(*inputs)
        assert found is not None
        for one, other in zip(found, _gradients_by_definition(*inputs)):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-3)
        without = native.softmax_gradients(*inputs, of_keys=False)
        assert without is not None and without[1] is None and without[2] is None
        assert torch.equal(without[0], found[0]) and torch.equal(without[3], found[3])


def _gradients_by_definition(features, direction, offset, values, codes, grad) -> list:
    """By autograd in float64: the softmax's gradient, but for the values that of the picked row."""
    parts = [t.double().requires_grad_() for t in (features, direction, offset, values)]
    x, w, b, v = parts
    groups = codes.shape[1]
    if not len(x):  # torch 1.12 has no gradient of an empty product
        return [torch.zeros_like(part) for part in parts]
    score = torch.einsum("rdm,dkm->rdk", x, w.expand(groups, -1, -1)) + b
    mixed = torch.einsum("rdk,dks->rds", score.softmax(-1), v.detach().expand(groups, -1, -1))
    picked = v.expand(groups, -1, -1)[torch.arange(groups), codes]
    return list(torch.autograd.grad([mixed, picked], parts, [grad.double(), grad.double()]))


def test_softmax_gradients_refuse_codes_out_of_range() -> None:
    codes = torch.tensor([[0], [2]])
    rest = (torch.randn(1, 2, 3), torch.randn(1, 2), torch.randn(1, 2, 3), codes)
    with pytest.raises(ValueError, match="row 1 has a code that is not below K=2"):
        native.softmax_gradients(torch.randn(2, 1, 3), *rest, torch.randn(2, 1, 3))


@pytest.mark.parametrize("seed", range(4))
def test_logits_are_the_products_with_the_table(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(100):
        form = random_form(rng)
        h = torch.randn(rng.choice([1, 2, 3, 4, 5, 8, 9, 16, 17, 33]), form.embedding_dim)
        table = form.weight.double()
        found = table_of(form).logits(h)
        assert found is not None
        # Rounding of a sum of d products is bounded by d u |h||w|.
        bound = form.embedding_dim * 2.0**-23 * (h.double().abs() @ table.abs().t()) + 1e-30
        assert ((found - h.double() @ table.t()).abs() <= bound).all(), form
        if form.padding_idx is not None:
            assert (found[:, form.padding_idx] == 0).all()


def test_logits_add_up_group_after_group() -> None:
    """The order of operations by hand: sums per group first, then over groups, all in float32."""
    form = small_form()
    h = torch.randn(3, 32)
    values = form.values.view(8, 32, 4)
    for b in range(3):
        for row in range(7):
            total = torch.zeros(())
            for j in range(8):
                v = values[j, form.codes[row, j].long()]
                product = h[b, 4 * j] * v[0]
                for i in range(1, 4):
                    product = product + h[b, 4 * j + i] * v[i]
                total = total + product
            found = table_of(form).logits(h)
            assert found is not None and found[b, row] == total


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_keep_the_type_of_h(dtype: torch.dtype) -> None:
    form = small_form()
    h = torch.randn(2, 5, 32).to(dtype)
    found = table_of(form).logits(h)
    assert found is not None and found.dtype == dtype and found.shape == (2, 5, 7)
    want = table_of(form).logits(h.float())
    assert want is not None and torch.equal(found, want.to(dtype))


@pytest.mark.parametrize("seed", range(8))
def test_codes_are_the_definition_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(150):
        query, keys, distance, stats = random_query(rng)
        given = () if stats is None else (stats.mean, stats.scale())
        found = native.codes(query, keys, distance, *given)
        want = ordered_codes(query, keys, DISTANCES[distance], stats)
        assert torch.equal(found, want), (query.shape, keys.shape, distance)


def test_codes_are_those_of_evaluation() -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(3000, 16, 4), torch.randn(16, 32, 4)
    for distance in ("dot", "euclidean"):
        with no_library():
            want = evaluation_codes(query, keys, DISTANCES[distance], None)
        assert torch.equal(native.codes(query, keys, distance), want)
        assert torch.equal(evaluation_codes(query, keys, DISTANCES[distance], None), want)


def test_codes_of_rows_that_lie_apart() -> None:
    torch.manual_seed(0)
    wide, keys = torch.randn(100, 3, 16), torch.randn(2, 9, 8)
    query = wide[::2, 1].view(50, 2, 8)
    want = native.codes(query.contiguous(), keys, "dot")
    assert torch.equal(native.codes(query, keys, "dot"), want)
    turned = torch.randn(2, 50, 8).transpose(0, 1)
    assert torch.equal(
        native.codes(turned, keys, "dot"), native.codes(turned.contiguous(), keys, "dot")
    )


@pytest.mark.parametrize("seed", range(3))
def test_packing_has_the_bits_of_pytorch(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(100):
        D = rng.choice([1, 3, 8, 17, 300])
        widest = rng.choice([0, 1, 5, 8, 9, 15])
        bits = [widest] * D if rng.random() < 0.5 else [rng.randint(0, widest) for _ in range(D)]
        codes = torch.stack([torch.randint(1 << b, (20,)) for b in bits], 1)
        if widest <= 8 and rng.random() < 0.5:
            codes = codes.to(torch.uint8)
        if rng.random() < 0.2:
            codes[3] = 255  # only the lowest bits of a code count
        with no_library():
            packed = pack_codes(codes, bits)
        assert torch.equal(native.pack(codes, bits, row_bytes(bits)), packed)
        for kind in (torch.int16, torch.int64):
            with no_library():
                want = unpack_codes(packed, bits, kind)
            assert torch.equal(native.unpack(packed, bits, kind), want)


@pytest.mark.parametrize("variant", ["baseline", "avx2"])
def test_other_instruction_sets_give_the_same_bits(variant: str) -> None:
    """Each process picks its instruction set once; a second one compares by a checksum."""
    code = """
import torch, zlib
from helpers.native_cases import random_form, random_query, table_of
import random
from fairseq_dpq import native
rng = random.Random(5); torch.manual_seed(5); crc = 0
def add(tensor):
    global crc
    crc = zlib.crc32(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()), crc)
for _ in range(40):
    form = random_form(rng); table = table_of(form)
    add(table.lookup(torch.arange(form.num_embeddings)))
    add(table.logits(torch.randn(5, form.embedding_dim)))
    query, keys, distance, _ = random_query(rng)
    add(native.codes(query, keys, distance))
    codes, error = native.nearest(query, keys)
    add(codes), add(error), add(native.centroid_sums(query, codes, keys.shape[1])[0])
    add(native.first_centroids(query.nan_to_num(), torch.rand(query.shape[1], 9)))
print(crc)
"""
    tests = str(Path(__file__).resolve().parents[1])
    found = []
    for wanted in (variant, "best"):
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"FAIRSEQ_DPQ_NATIVE_VARIANT": wanted, "PYTHONPATH": path}
        environment = {**os.environ, **variables}
        command = [sys.executable, "-c", code]
        found.append(
            subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        )
    assert found[0] == found[1] != b""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [-1, 7, 1 << 40, -(1 << 63)])
def test_an_index_out_of_range_is_an_index_error(packed: bool, bad: int) -> None:
    form = small_form(packed)
    indices = torch.tensor([[0, 1], [bad, 2]])
    with pytest.raises(IndexError, match=f"index {bad} is out of range: the table has 7 rows"):
        table_of(form).lookup(indices)


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_codes_are_an_index_error(packed: bool) -> None:
    form = small_form(packed, K=30)
    form.codes[4] = 255
    table = table_of(form)
    with pytest.raises(IndexError, match="row 4 of the table has a code"):
        table.lookup(torch.tensor([1, 4]))
    with pytest.raises(IndexError, match="row 4 of the table has a code"):
        table.logits(torch.randn(1, 32))
    good = torch.tensor([1, 5])
    assert torch.equal(table.lookup(good), form(good))


def test_strided_misaligned_and_empty_inputs() -> None:
    form = small_form()
    table = table_of(form)
    every = torch.arange(7).repeat_interleave(2)[::2]
    assert torch.equal(table.lookup(every), form(torch.arange(7)))
    store = bytearray(8 * 3 + 1)
    store[1:] = torch.tensor([4, 5, 6]).numpy().tobytes()
    shifted = torch.frombuffer(store, dtype=torch.int64, offset=1)
    assert torch.equal(table.lookup(shifted), form(torch.arange(4, 7)))
    h = torch.randn(64, 3).t()[:, ::2]
    assert torch.equal(
        table.logits(h),
        table.logits(h.contiguous()),
    )
    empty = table.lookup(torch.empty(2, 0, dtype=torch.int64))
    assert empty is not None and empty.shape == (2, 0, 32)
    none = table.logits(torch.empty(0, 32))
    assert none is not None and none.shape == (0, 7)
    assert native.codes(torch.empty(0, 2, 4), torch.randn(2, 3, 4), "dot").shape == (0, 2)


def test_what_the_library_does_not_take_is_left_to_pytorch() -> None:
    form = small_form()
    table = table_of(form)
    indices = torch.tensor([1, 2])
    assert table.serves(form.codes, form.values, None)
    assert not table.serves(form.codes.clone(), form.values, None)
    assert not table.serves(form.codes, form.values.half(), None)
    assert not table.serves(form.codes, form.values, 0)
    assert table.lookup(indices.to(torch.int16)) is None
    h = torch.randn(1, 32, requires_grad=True)
    assert table.logits(h) is None
    form.values.requires_grad_()
    assert table.lookup(indices) is None and table.logits(h.detach()) is None


def test_the_environment_turns_it_off() -> None:
    code = "from fairseq_dpq import native; print(native.available(), native.describe())"
    environment = {**os.environ, "FAIRSEQ_DPQ_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode().strip() == (
        "False native library: turned off by FAIRSEQ_DPQ_NATIVE=0"
    )


def test_triton_serves_on_demand_only(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    tried = []
    monkeypatch.setattr(native.library, "find_spec", lambda name: tried.append(name))
    for switch, expected in (("0", []), ("1", ["triton"])):
        monkeypatch.setenv("FAIRSEQ_DPQ_TRITON", switch)
        native.library.gpu.cache_clear()
        assert native.library.gpu("cuda:0") is None and tried == expected
    assert "FAIRSEQ_DPQ_TRITON=1, but triton is not installed" in caplog.text
    native.library.gpu.cache_clear()
