"""The method low_rank: rows, gradients and starts against matrix products worked out here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fairseq_dpq import DPQConfigError, DPQEmbedding, collect_regularizer
from fairseq_dpq.methods.low_rank import LowRank

PAD = 1


def make() -> DPQEmbedding:
    torch.manual_seed(0)
    return DPQEmbedding(20, 6, PAD, method="low_rank", rank=3)


def test_rows_are_the_product_of_two_matrices() -> None:
    layer = make()
    assert isinstance(layer.method, LowRank)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "query": (20, 3),
        "values": (3, 6),
    }
    wanted = layer.query.detach().numpy() @ layer.values.detach().numpy()
    ids = torch.tensor([[2, PAD], [19, 0]])
    for mode in (True, False):
        np.testing.assert_allclose(
            layer.train(mode)(ids).detach().numpy(), wanted[ids.numpy()], atol=1e-6
        )
    assert not wanted[PAD].any() and collect_regularizer(layer) == 0


def test_gradient_by_hand() -> None:
    layer = make()
    grad = torch.randn(2, 6)
    layer(torch.tensor([4, 7])).backward(grad)
    assert layer.query.grad is not None and layer.values.grad is not None
    torch.testing.assert_close(layer.query.grad[[4, 7]], grad @ layer.values.detach().t())
    assert layer.query.grad.count_nonzero() == 6
    torch.testing.assert_close(layer.values.grad, layer.query.detach()[[4, 7]].t() @ grad)


def test_compact_gives_the_same_bits_and_has_the_size_of_the_formula() -> None:
    layer = make().eval()
    compact = layer.compact()
    ids = torch.arange(20)
    assert torch.equal(compact(ids), layer(ids)) and compact.kind == "low_rank"
    assert compact.saved_nbytes == 4 * 3 * (20 + 6)
    assert layer.compression_ratio() == pytest.approx(20 * 6 / (3 * 26))
    with pytest.raises(ValueError, match="method low_rank has no codes"):
        layer.codes()


def test_start_from_a_table_of_that_rank_is_exact() -> None:
    torch.manual_seed(1)
    table = torch.randn(30, 2) @ torch.randn(2, 8)
    layer = DPQEmbedding.from_pretrained(table, PAD, method="low_rank", rank=2)
    table[PAD] = 0
    torch.testing.assert_close(layer.weight.detach(), table, rtol=1e-4, atol=1e-5)


def test_options_of_codes_are_refused() -> None:
    with pytest.raises(DPQConfigError, match="reseed_after=5 has no effect with method='low_rank'"):
        DPQEmbedding(20, 6, method="low_rank", rank=3, reseed_after=5)
    with pytest.raises(DPQConfigError, match="rank=7: exceeds the embedding size 6"):
        DPQEmbedding(20, 6, method="low_rank", rank=7)
