"""Numbers of code tables that were worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fairseq_dpq.report import build
from fairseq_dpq.training.codes import code_counts
from helpers.toy_checkpoints import make_layer

# Four symbols and padding (row 1), three groups; codes of group 2 are always 0.
CODES = torch.tensor([[0, 3, 0], [2, 2, 0], [0, 1, 0], [1, 3, 0], [0, 3, 0]], dtype=torch.uint8)


def test_counts_leave_padding_out() -> None:
    counts = code_counts(CODES, 4, 1)
    assert counts.tolist() == [[3, 1, 0, 0], [0, 1, 0, 3], [4, 0, 0, 0]]
    assert code_counts(CODES, 4, None)[0].tolist() == [3, 1, 1, 0]


def test_use_and_entropy_by_hand() -> None:
    use = build.code_use(code_counts(CODES, 4, 1), [4, 4, 4])
    quarter = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert use["used"] == [2, 2, 1]
    assert use["entropy_bits"] == pytest.approx([quarter, quarter, 0], abs=1e-4)
    assert use["entropy_bits_per_symbol"] == pytest.approx(2 * quarter)
    assert use["possible_bits_per_symbol"] == 6
    assert use["used_share"] == pytest.approx(5 / 12)


def test_counts_are_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = code_counts(CODES, 4, 1)
    monkeypatch.setattr("fairseq_dpq.training.codes._ROWS", 2)
    assert torch.equal(code_counts(CODES, 4, 1), whole)
    assert build.code_change(CODES, CODES.flip(0), [4, 4, 4])["codes"] == pytest.approx(4 / 15)


def test_symbols_that_share_all_codes() -> None:
    """Rows 0 and 4 are equal; padding equals nobody, and would not count if it did."""
    shared = build.shared_codes(CODES, [4, 4, 4], 1)
    assert (shared["symbols"], shared["distinct"], shared["sharing"]) == (4, 3, 2)
    assert shared["largest_sets"] == [{"size": 2, "ids": [0, 4]}]
    same = CODES.clone()
    same[1] = same[0]
    assert build.shared_codes(same, [4, 4, 4], 1)["sharing"] == 2
    assert build.shared_codes(same, [4, 4, 4], None)["largest"] == 3


def test_change_by_codes_symbols_and_bits() -> None:
    """Codes 0 -> 3 (two bits) and 3 -> 2 (one bit) in one symbol, 1 -> 0 in another."""
    new = CODES.clone()
    new[0, 0], new[0, 1], new[2, 1] = 3, 2, 0
    change = build.code_change(CODES, new, [4, 4, 4])
    assert change["codes"] == pytest.approx(3 / 15)
    assert change["symbols"] == pytest.approx(2 / 5)
    assert change["bits"] == pytest.approx(4 / 30)


def test_distance_of_queries_to_centroids() -> None:
    """VQ with centroids 0 and 10 in both groups: queries (9, 1) are 1 away in each group, with a
    length of sqrt(82); queries (10, 0) are on the centroids."""
    layer = make_layer(n=5, d=2, D=2, K=2, method="vq", schedule="warmup", pad=4)
    with torch.no_grad():
        layer.values.copy_(torch.tensor([[[0.0], [10.0]], [[0.0], [10.0]]]))
        layer.query.copy_(torch.tensor([[9.0, 1], [9, 1], [9, 1], [10, 0], [0, 0]]))
    far = build.query_distances(layer, layer.codes())
    assert far is not None and (far["symbols"], far["measured"]) == (4, 4)
    assert far["relative"]["mean"] == pytest.approx(0.75 * math.sqrt(2 / 82))
    assert far["relative"]["median"] == pytest.approx(math.sqrt(2 / 82))
    assert far["distance"]["mean"] == pytest.approx(0.75)
    histogram = far["relative"]["histogram"]
    assert sum(histogram["counts"]) == 4 and histogram["counts"][0] == 1


def test_distances_of_large_queries_are_finite() -> None:
    """The square of 3e38 is beyond float32."""
    layer = make_layer(n=5, d=2, D=2, K=2, method="vq", schedule="warmup", pad=4)
    with torch.no_grad():
        layer.values.copy_(torch.tensor([[[0.0], [10.0]], [[0.0], [10.0]]]))
        layer.query.copy_(torch.tensor([[3e38, 1], [9, 1], [9, 1], [10, 0], [0, 0]]))
    far = build.query_distances(layer, layer.codes())
    assert far is not None and sum(far["relative"]["histogram"]["counts"]) == 4
    assert far["relative"]["mean"] == pytest.approx((1 + 2 * math.sqrt(2 / 82)) / 4)


def test_sample_reaches_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows at a distance of 1, 1, 1 and 0, two: the first and the last."""
    monkeypatch.setattr(build, "SAMPLE", 2)
    layer = make_layer(n=4, d=1, D=1, K=2, method="vq", schedule="warmup", pad=None)
    with torch.no_grad():
        layer.values.copy_(torch.tensor([[[0.0], [10.0]]]))
        layer.query.copy_(torch.tensor([[9.0], [9], [9], [10]]))
    far = build.query_distances(layer, layer.codes())
    assert far is not None and far["distance"]["mean"] == pytest.approx(0.5)


def test_distances_of_many_symbols_are_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SAMPLE", 7)
    layer = make_layer()
    far = build.query_distances(layer, layer.codes())
    assert far is not None and (far["symbols"], far["measured"]) == (59, 7)


def test_method_without_keys_has_no_distances() -> None:
    from fairseq_dpq import DPQEmbedding

    layer = DPQEmbedding(10, 8, method="low_rank", rank=2).eval()
    assert build.query_distances(layer, torch.zeros(10, 1)) is None
