"""Logits from codes: those of the dense table but for rounding, and without that table."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fairseq_dpq import CodesLinear, CompactEmbedding
from fairseq_dpq.output import StoredWeight
from helpers.native_cases import no_library, random_form


@pytest.fixture
def no_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> torch.Tensor:
        raise AssertionError("a dense table was built")

    monkeypatch.setattr(CompactEmbedding, "dense", refuse)


def bound(form: CompactEmbedding, h: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rounding of a sum of d products stays below d u |h||w|."""
    return form.embedding_dim * 2.0**-23 * (h.double().abs() @ table.abs().t()) + 1e-30


@pytest.mark.parametrize("library", [contextlib.nullcontext, no_library])
@pytest.mark.parametrize("seed", range(3))
def test_logits_are_the_products_with_the_table(seed: int, library: Any, no_dense: None) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(60):
        form = random_form(rng)
        table = form(torch.arange(form.num_embeddings)).double()
        h = torch.randn(rng.choice([1, 2, 5, 33]), form.embedding_dim)
        with library():
            found = CodesLinear(form)(h)
        assert found.dtype == h.dtype and found.shape == (len(h), form.num_embeddings)
        assert ((found - h.double() @ table.t()).abs() <= bound(form, h, table)).all(), form
        if form.padding_idx is not None:
            assert (found[:, form.padding_idx] == 0).all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_the_dense_product(packed: bool, shared: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(1 if shared else 4, 6, 3)
    codes = torch.randint(6, (5000, 4))  # more than one chunk of rows
    form = CompactEmbedding.from_codes(codes, values, 12, 1, packed=packed)
    h = torch.randn(2, 3, 12, requires_grad=True)
    weights = torch.randn(2, 3, 5000)
    (CodesLinear(form)(h) * weights).sum().backward()
    found = h.grad
    h.grad = None
    (F.linear(h, form.dense()) * weights).sum().backward()
    assert found is not None and torch.allclose(found, h.grad, rtol=1e-4, atol=1e-3)
    form.values.requires_grad_()
    (CodesLinear(form)(h.detach()) * weights).sum().backward()
    found, form.values.grad = form.values.grad, None
    (F.linear(h.detach(), form.dense()) * weights).sum().backward()
    assert torch.allclose(found[:-1], form.values.grad[:-1], rtol=1e-3, atol=1e-2)


def test_h_of_another_size_is_refused() -> None:
    form = CompactEmbedding(5, 12, K=3, D=4)
    with pytest.raises(ValueError, match="h has 6 numbers a row, the table 12"):
        CodesLinear(form)(torch.zeros(2, 6))


def test_a_stand_in_serves_linear_without_the_table(no_dense: None) -> None:
    torch.manual_seed(0)
    form = CompactEmbedding.from_codes(torch.randint(6, (50, 4)), torch.randn(4, 6, 3), 12)
    table = form(torch.arange(50))
    weight: Any = StoredWeight(form)
    h, bias = torch.randn(2, 12), torch.randn(50)
    for found in (F.linear(h, weight, bias), F.linear(h, weight=weight, bias=bias)):
        assert torch.allclose(found, F.linear(h, table, bias), atol=1e-5)
    assert weight.shape == (50, 12) and weight.size(1) == 12 and len(weight) == 50


def test_a_stand_in_is_the_table_to_everything_else() -> None:
    torch.manual_seed(0)
    form = CompactEmbedding.from_codes(torch.randint(6, (50, 4)), torch.randn(4, 6, 3), 12)
    weight: Any = StoredWeight(form)
    table = form.dense()
    h = torch.randn(2, 12)
    assert torch.equal(h @ weight.t(), h @ table.t())
    assert torch.equal(torch.cat([weight, weight]), torch.cat([table, table]))
    assert torch.equal(weight[3:5], table[3:5]) and torch.equal(weight.sum(0), table.sum(0))
    assert torch.equal(F.embedding(torch.tensor([7]), weight), table[7:8])
