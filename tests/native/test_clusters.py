"""A round of k-means by the native library: nearest centroids, sums, first centroids."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.training.kmeans import assign, kmeans, means
from helpers.native_cases import no_library

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def random_points(rng: random.Random) -> tuple[Tensor, Tensor]:
    D, size = rng.choice([1, 2, 5, 17]), rng.choice([1, 2, 3, 4, 5, 8, 16, 33])
    K, n = rng.choice([1, 2, 31, 256, 300]), rng.choice([1, 63, 64, 65, 600])
    points, centroids = torch.randn(n, D, size), torch.randn(rng.choice([1, D]), K, size)
    if rng.random() < 0.5:  # ties
        points, centroids = points.round(), centroids.round()
    return points, centroids


@pytest.mark.parametrize("seed", range(4))
def test_nearest_is_the_definition_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        points, centroids = random_points(rng)
        found = native.nearest(points, centroids)
        assert found is not None
        codes, error = found
        n, D, size = points.shape
        assert codes.shape == (n, D)
        assert codes.dtype == (torch.uint8 if centroids.shape[1] <= 256 else torch.int16)
        half = torch.zeros(centroids.shape[:2])
        for i in range(size):
            half = half + centroids[..., i] * centroids[..., i]
        score = points[..., 0, None] * centroids[None, ..., 0] - half / 2
        for i in range(1, size):
            score = score + points[..., i, None] * centroids[None, ..., i]
        assert torch.equal(codes.long(), score.argmax(-1))
        own = centroids.expand(D, -1, -1)[torch.arange(D), codes.long()]
        expected = (points.double() - own.double()).pow(2).sum((0, 2))
        torch.testing.assert_close(error, expected, rtol=1e-5, atol=1e-6)


def test_nearest_reads_a_table_where_it_lies() -> None:
    torch.manual_seed(0)
    wide = torch.randn(700, 2, 24)
    table = wide[:, 1]  # rows 48 numbers apart
    centroids = torch.randn(6, 10, 4)
    views = {
        "rows apart": table.view(700, 6, 4),
        "by group": table.view(700, 6, 4).transpose(0, 1).contiguous().transpose(0, 1),
        "float64": table.view(700, 6, 4).double(),
        "numbers apart": torch.stack([table, table], -1)[..., 0].view(700, 6, 4),
    }
    expected = native.nearest(table.contiguous().view(700, 6, 4), centroids)
    weights = torch.rand(700)
    assert expected is not None
    sums = native.centroid_sums(views["rows apart"].contiguous(), expected[0], 10, weights)
    assert sums is not None
    for name, points in views.items():
        found = native.nearest(points, centroids)
        assert found is not None and all(map(torch.equal, found, expected)), name
        again = native.centroid_sums(points, found[0], 10, weights)
        assert again is not None and all(map(torch.equal, again, sums)), name


def test_points_that_have_no_distance() -> None:
    points = torch.zeros(3, 1, 2)
    points[1, 0, 0] = float("nan")
    centroids = torch.tensor([[[float("nan"), 0.0], [5, 5], [1, 1]]])
    found = native.nearest(points, centroids)
    assert found is not None and found[0].flatten().tolist() == [2, 0, 2]


def test_half_precision_in_several_parts() -> None:
    torch.manual_seed(0)
    points, centroids = torch.randn(70_000, 2, 2).half(), torch.randn(2, 5, 2)
    found, expected = native.nearest(points, centroids), native.nearest(points.float(), centroids)
    assert found is not None and expected is not None
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=0)
    sums = native.centroid_sums(points, found[0], 5)
    assert sums is not None and sums[1].sum() == 140_000
    codes = found[0].clone()
    codes[69_999, 1] = 5
    with pytest.raises(ValueError, match="row 69999 has a code"):
        native.centroid_sums(points, codes, 5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_sums_are_those_of_index_add(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(40):
        points, centroids = random_points(rng)
        n, D, size = points.shape
        K = min(centroids.shape[1], 256)
        codes, weights = torch.randint(K, (n, D)), rng.choice([None, torch.rand(n)])
        found = native.centroid_sums(points, codes.to(dtype), K, weights)
        assert found is not None
        weight = torch.ones(n, dtype=torch.float64) if weights is None else weights.double()
        for j in range(D):
            rows = weight[:, None] * points[:, j].double()
            expected = torch.zeros(K, size, dtype=torch.float64).index_add(0, codes[:, j], rows)
            assert torch.equal(found[0][j], expected)
            mass = torch.zeros(K, dtype=torch.float64).index_add(0, codes[:, j], weight)
            assert torch.equal(found[1][j], mass)


def test_first_centroids_by_hand() -> None:
    """Distances from 0 are 0, 1, 9, 36: with 46 in all, the draws below fall on these points."""
    points = torch.tensor([0.0, 1, 3, 6]).view(4, 1, 1)
    for draw, expected in ((0.0, 1), (0.9 / 46, 1), (1.1 / 46, 3), (9.9 / 46, 3), (10.1 / 46, 6)):
        found = native.first_centroids(points, torch.tensor([[0.1, draw]], dtype=torch.float64))
        assert found is not None and found.flatten().tolist() == [0, expected]
    # Where all points are centroids already, any of them may follow.
    found = native.first_centroids(points[:2], torch.tensor([[0.9, 0.0, 0.6, 0.1]]))
    assert found is not None and found.flatten().tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("n", [1, 5, 64, 65, 1000])
def test_first_centroids_are_different_points(n: int) -> None:
    torch.manual_seed(n)
    points = torch.randn(n, 3, 5)
    K = min(n, 20)
    found = native.first_centroids(points, torch.rand(3, K))
    assert found is not None
    for j in range(3):
        is_one = (found[j][:, None] == points[:, j][None]).all(-1)  # (K, n)
        assert is_one.sum(1).eq(1).all() and is_one.sum(0).max() == 1


def test_threads_give_the_same_bits(two_threads: None) -> None:
    torch.manual_seed(0)
    points, centroids, weights = torch.randn(5000, 16, 4), torch.randn(16, 64, 4), torch.rand(5000)

    def results() -> list[Tensor]:
        codes, error = native.nearest(points, centroids)
        first = native.first_centroids(points, draws)
        return [codes, error, *native.centroid_sums(points, codes, 64, weights), first]

    draws = torch.rand(16, 64)
    two = results()
    torch.set_num_threads(1)
    assert all(map(torch.equal, two, results()))


def test_kmeans_by_the_library_is_as_good_as_by_pytorch() -> None:
    torch.manual_seed(0)
    points, weight = torch.randn(6, 3000, 4), torch.rand(3000)

    def error(centroids: Tensor) -> float:
        own = centroids[torch.arange(6)[:, None], assign(points, centroids)]
        return float(((points - own).pow(2).sum(-1) * weight).sum())

    found = kmeans(points, 32, weight=weight)
    with no_library():
        expected = kmeans(points, 32, weight=weight)
        codes = assign(points, found)
    assert abs(error(found) / error(expected) - 1) < 0.01
    assert torch.equal(assign(points, found), codes)
    mean, _ = means(points, codes, 32, weight)
    assert (mean - found).abs().max() < 0.05  # 25 rounds: nearly at rest


def test_an_empty_cluster_restarts() -> None:
    points = torch.tensor([0.0, 0, 0, 0, 9, 10]).view(1, 6, 1)
    assert sorted(kmeans(points, 3, seed=1).flatten().tolist()) == [0, 9, 10]
