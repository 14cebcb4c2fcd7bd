"""Starting values: another table's initialiser, and a trained table, as well as product
quantisation has it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fairseq_dpq import DPQEmbedding
from fairseq_dpq.training.kmeans import assign, kmeans
from fairseq_dpq.training.trackers import KeyAverage
from helpers.layers import make


@pytest.mark.parametrize("schedule", ["warmup", "paper"])
def test_reset_parameters_like_another_table(schedule: str) -> None:
    """Values follow the table's initialiser; queries and keys start small whatever it is."""
    full = nn.Embedding(500, 24, 1)
    nn.init.uniform_(full.weight, -0.1, 0.1)
    layer = make(500, schedule=schedule)
    layer.reset_parameters(full.weight)
    assert layer.values.abs().max() <= 0.1
    assert abs(layer.values.std().item() - 0.2 / 12**0.5) < 0.01
    for parameter in (layer.query, layer.keys):
        assert abs(parameter.std().item() - 0.02) < 0.002
    assert not layer.query[1].any()
    layer.reset_parameters(full.weight, tied=True)
    assert abs(layer.query.std().item() - 0.1 / 12**0.5) < 0.002


def test_vq_trained_as_in_the_paper_starts_like_the_table() -> None:
    full = nn.Embedding(500, 24, 1)
    nn.init.uniform_(full.weight, -0.1, 0.1)
    layer = make(500, method="vq", schedule="paper")
    layer.reset_parameters(full.weight)
    assert torch.equal(layer.query[2:], full.weight[2:])
    for parameter in layer.parameters():
        assert set(parameter.flatten().tolist()) <= {0.0, *full.weight.flatten().tolist()}
    # With a gradient of their own the centroids keep it, and queries are as small as those of sx.
    layer = make(500, method="vq", schedule="paper", value_gradient=0.1)
    layer.reset_parameters(full.weight)
    assert abs(layer.query[2:].std().item() - 0.02) < 0.002
    assert set(layer.values.flatten().tolist()) <= set(full.weight.flatten().tolist())
    # nn.Embedding's own N(0, 1) is too large.
    alone = DPQEmbedding(500, 24, 1, K=8, D=4, method="vq", schedule="paper")
    assert 0.01 < alone.query.std() < 0.1


@pytest.mark.parametrize(
    "own, start",
    [(0.1, 0.05), (0.03, 0.015), (1.0, 0.06), (0.008, 0.004), (0.001, 0.002), (None, 0.06)],
)
def test_vq_starts_at_half_the_scale_of_the_table(own: float | None, start: float) -> None:
    layer = DPQEmbedding(500, 24, 1, K=64, D=6, method="vq", schedule="warmup")
    if own is not None:
        layer.reset_parameters(torch.randn(500, 24) * own)
    for parameter in (layer.query, layer.values):
        assert abs(parameter.std().item() / start - 1) < 0.1
    assert not layer.query[1].any()
    assert DPQEmbedding(8, 4, K=2, D=2, method="vq", device="meta").query.is_meta


@pytest.mark.parametrize("own, start", [(0.1, 0.02), (0.03, 0.015), (0.008, 0.004), (0.0, 0.002)])
def test_sx_does_not_start_larger_than_the_table(own: float, start: float) -> None:
    layer = make(500, schedule="warmup")
    layer.reset_parameters(torch.randn(500, 24) * own)
    for parameter in (layer.query, layer.keys):
        assert abs(parameter.std().item() / start - 1) < 0.1


def product_quantization_error(table: torch.Tensor, K: int, D: int, shared: bool) -> float:
    """Relative squared error of k-means in each subspace, as plain product quantisation has it."""
    n, d = table.shape
    points = table.view(n, D, d // D)
    points = points.reshape(1, n * D, -1) if shared else points.transpose(0, 1).contiguous()
    centroids = kmeans(points, K)
    codes = assign(points, centroids)
    rebuilt = torch.stack([c[k] for c, k in zip(centroids, codes)])
    return ((rebuilt - points).pow(2).sum() / table.pow(2).sum()).item()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method", ["sx", "vq"])
def test_from_pretrained_is_as_good_as_product_quantization(method: str, shared: bool) -> None:
    g = torch.Generator().manual_seed(0)
    table = torch.randn(1500, 48, generator=g) * torch.linspace(0.1, 2, 48)
    table[1] = 0
    wanted = product_quantization_error(table, 16, 12, shared)
    how = {"K": 16, "D": 12, "method": method, "share_subspaces": shared}
    layer = DPQEmbedding.from_pretrained(table, 1, **how).eval()
    assert layer.config.schedule == "warmup"
    with torch.no_grad():
        error = ((layer.weight - table).pow(2).sum() / table.pow(2).sum()).item()
    assert 0.1 < wanted < 0.6
    assert error < 1.01 * wanted
    with pytest.raises(
        ValueError, match="schedule paper, and what needs it, is for a random start"
    ):
        DPQEmbedding.from_pretrained(table, 1, schedule="paper", **how)


def test_from_pretrained_details() -> None:
    table = torch.randn(100, 16).half()
    steps: list[int] = []
    layer = DPQEmbedding.from_pretrained(
        table, 3, K=8, D=4, method="vq", ema_decay=0.9, seed=5, progress=steps.append
    )
    assert layer.query.dtype == torch.float16 and layer.padding_idx == 3 and steps[0] == 1
    torch.testing.assert_close(layer.ema_sum, layer.values.float(), rtol=1e-3, atol=1e-3)
    values = layer.values.detach().clone()
    layer.defer_updates = True
    for _ in range(3):
        layer(torch.arange(100))
        next(t for t in layer.trackers if isinstance(t, KeyAverage)).clear()
        assert layer.step() is False  # the table was the start: no k-means of the first batches
    assert torch.equal(layer.values, values)
    with pytest.raises(ValueError, match=r"table has shape \(3,\); give \(num_embeddings, d\)"):
        DPQEmbedding.from_pretrained(torch.randn(3))
