"""k-means: clusters that are known, weights, empty clusters, one assignment in any chunks."""

from __future__ import annotations

import pytest
import torch

from fairseq_dpq.training import kmeans as module
from fairseq_dpq.training.kmeans import assign, kmeans, means


def test_finds_separate_clusters_in_each_subspace() -> None:
    g = torch.Generator().manual_seed(0)
    centres = 20 * torch.randn(3, 8, 5, generator=g)
    points = centres.repeat(1, 40, 1) + 0.1 * torch.randn(3, 320, 5, generator=g)
    found = kmeans(points, 8, seed=1)
    assert torch.cdist(centres, found).amin(-1).max() < 0.2
    assert torch.equal(found, kmeans(points, 8, seed=1))  # the same seed, the same centroids


def test_error_does_not_rise_over_iterations() -> None:
    points = torch.randn(2, 500, 4, generator=torch.Generator().manual_seed(0))
    errors = []
    for iterations in range(1, 12):
        c = kmeans(points, 16, iterations=iterations)
        errors.append(torch.cdist(points, c).pow(2).amin(-1).sum().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0]


def test_weight_counts_a_point_several_times() -> None:
    points = torch.tensor([[[0.0], [1.0], [4.0]]])
    weight = torch.tensor([3.0, 1.0, 2.0])
    mean, mass = means(points, torch.tensor([[0, 0, 1]]), 2, weight)
    assert mean.flatten().tolist() == [0.25, 4.0] and mass.flatten().tolist() == [4.0, 2.0]
    repeated = torch.tensor([[[0.0], [0.0], [0.0], [1.0], [4.0], [4.0]]])
    assert kmeans(points, 1, weight=weight).item() == pytest.approx(repeated.mean().item())


@pytest.mark.parametrize("n", [1, 3])
def test_fewer_points_than_centroids(n: int) -> None:
    points = torch.randn(2, n, 3)
    found = kmeans(points, 8)
    assert found.shape == (2, 8, 3) and torch.isfinite(found).all()
    assert torch.cdist(points, found).amin(-1).max() < 1e-6  # each point is a centroid


def test_coinciding_points() -> None:
    found = kmeans(torch.ones(1, 50, 2), 4)
    assert torch.isfinite(found).all() and (found == 1).all(-1).any()


def test_empty_clusters_are_refilled() -> None:
    # 90 points at 0, one at each of 1..10: every value gets a centroid of its own in the end
    points = torch.cat([torch.zeros(90), torch.arange(1.0, 11.0)]).view(1, 100, 1)
    found = kmeans(points, 11, iterations=50)
    assert sorted(found.flatten().round().tolist()) == list(map(float, range(11)))


def test_sample_and_progress() -> None:
    seen: list[int] = []
    points = torch.randn(1, 1000, 2)
    found = kmeans(points, 4, max_points=100, iterations=3, progress=seen.append)
    assert found.shape == (1, 4, 2) and seen[:3] == [1, 2, 3][: len(seen)]
    with pytest.raises(ValueError, match="at least one point"):
        kmeans(torch.empty(1, 0, 2), 4)


def test_assignment_is_the_nearest_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    points, centroids = torch.randn(3, 200, 4), torch.randn(3, 9, 4)
    codes = assign(points, centroids)
    assert torch.equal(codes, torch.cdist(points, centroids).argmin(-1))
    monkeypatch.setattr(module, "_CHUNK", 100)
    assert torch.equal(assign(points, centroids), codes)
