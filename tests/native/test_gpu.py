"""The Triton kernels against PyTorch over the cases of the native library: in Triton's interpreter,
or on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import pytest
import torch

from fairseq_dpq import CompactEmbedding, native
from fairseq_dpq.training.codes import evaluation_codes, ordered_codes
from fairseq_dpq.training.distances import DISTANCES
from helpers.native_cases import by_pytorch, random_form, random_query

pytest.importorskip("triton")
from fairseq_dpq.native import gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def table_of(form: CompactEmbedding) -> gpu.GpuTable:
    how = (form.sizes, form.share_subspaces, form.packed, form.padding_idx)
    return gpu.GpuTable(native.Buffers(form.codes.to(DEVICE), form.values.to(DEVICE), *how))


@pytest.mark.parametrize("seed", range(3))
def test_lookup_has_the_bits_of_pytorch(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        form = random_form(rng)
        kind = rng.choice([torch.int32, torch.int64])
        indices = torch.randint(form.num_embeddings, (rng.choice([0, 1, 3]), 2), dtype=kind)
        found = table_of(form).lookup(indices.to(DEVICE))
        assert found is not None and found.dtype == form.values.dtype
        assert torch.equal(found.cpu(), by_pytorch(form, indices)), form


@pytest.mark.parametrize("seed", range(3))
def test_logits_are_the_products_with_the_table(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(6):
        form = random_form(rng, D=rng.choice([1, 3, 8, 17]))
        h = torch.randn(rng.choice([1, 2, 5, 17]), form.embedding_dim)
        table = form.weight.double()
        found = table_of(form).logits(h.to(DEVICE))
        assert found is not None and found.dtype == h.dtype
        bound = form.embedding_dim * 2.0**-22 * (h.double().abs() @ table.abs().t()) + 1e-30
        assert ((found.cpu() - h.double() @ table.t()).abs() <= bound).all(), form
        if form.padding_idx is not None:
            assert (found[:, form.padding_idx] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_codes_are_the_definition_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        query, keys, distance, stats = random_query(rng)
        normalization = () if stats is None else (stats.mean.to(DEVICE), stats.scale().to(DEVICE))
        given = query.to(DEVICE), keys.to(DEVICE)
        found = gpu.codes(*given, distance == "euclidean", *normalization)
        expected = ordered_codes(query, keys, DISTANCES[distance], stats)
        assert found.dtype == torch.int64 and torch.equal(found.cpu(), expected), distance


@pytest.mark.skipif(not INTERPRETED, reason="an assertion on a GPU ends all work of the process")
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_out_of_range_fails_an_assertion(packed: bool, monkeypatch: Any) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    # The kernels ask for assertions by debug=True, which the interpreter does not hear.
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    codes = torch.randint(20, (7, 8))
    form = CompactEmbedding.from_codes(codes, torch.randn(8, 20, 4), 32, packed=packed)
    for bad in (-1, 7, 1 << 40):
        with pytest.raises(Exception, match="index out of range"):
            table_of(form).lookup(torch.tensor([0, bad]))
    form.codes[3] = 255  # a code of 31 or 255, where the largest is 19
    for call in (
        lambda table: table.lookup(torch.tensor([3])),
        lambda table: table.logits(torch.randn(1, 32)),
    ):
        with pytest.raises(Exception, match="a code that its group does not have"):
            call(table_of(form))


def test_kernels_are_left_out_where_they_cannot_serve() -> None:
    gpu.check(DEVICE)
    form = CompactEmbedding.from_codes(torch.randint(20, (7, 8)), torch.randn(8, 20, 4), 32)
    table = table_of(form)
    h = torch.randn(1, 32, device=DEVICE)
    assert table.lookup(torch.tensor([1], dtype=torch.int16, device=DEVICE)) is None
    assert table.logits(h.double()) is None and table.logits(h[:, :4]) is None
    assert table.logits(h.clone().requires_grad_()) is None
    form.values.requires_grad_()
    if INTERPRETED:
        assert table.lookup(torch.tensor([1])) is None and table.logits(h) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_modules_use_the_kernels(monkeypatch: Any) -> None:
    monkeypatch.setenv("FAIRSEQ_DPQ_TRITON", "1")
    native.library.gpu.cache_clear()
    form: Any = CompactEmbedding.from_codes(torch.randint(20, (70, 8)), torch.randn(8, 20, 4), 32)
    expected = form(torch.arange(70))
    moved = form.cuda()
    assert isinstance(moved.native_table(), gpu.GpuTable)
    assert torch.equal(moved(torch.arange(70).cuda()).cpu(), expected)
    query, keys, distance, stats = random_query(random.Random(0))
    stats = None if stats is None else stats.to("cuda")
    found = evaluation_codes(query.cuda(), keys.cuda(), DISTANCES[distance], stats)
    assert native.library.gpu(found.device) is gpu
