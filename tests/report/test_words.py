"""Neighbours of planted vectors, and the words that are shown."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from fairseq_dpq.report import words
from fairseq_dpq.report.models import TableView
from fairseq_dpq.report.words import nearest


def _circle(*degrees: float) -> torch.Tensor:
    return torch.tensor([[math.cos(math.radians(x)), math.sin(math.radians(x))] for x in degrees])


def _table(rows: torch.Tensor, padding_idx: int | None = None) -> TableView:
    return TableView("t", *rows.shape, padding_idx, lambda ids: rows[ids], {})


def test_neighbours_are_those_of_the_angles() -> None:
    table = _circle(0, 90, 10, 350, 180, 25) * torch.tensor([[1.0], [9], [3], [0.1], [7], [2]])
    found = nearest(_table(table), 6, [0, 4], 3)
    assert found[0].tolist() == [[2, 3, 5], [1, 5, 2]]
    expected = [math.cos(math.radians(x)) for x in (10, 10, 25)]
    assert found[1][0].tolist() == pytest.approx(expected, abs=1e-6)


def test_equal_rows_come_in_their_order_in_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 7 is asked for; rows 1, 4, 9, 12 equal it; the others are further away."""
    torch.manual_seed(0)
    table = torch.randn(40, 8)
    for row in (1, 4, 9, 12):
        table[row] = table[7] * (row + 1)
    # Row 1 has a cosine of 1 - 2e-7, which counts as rounding.
    aside = torch.tensor([table[7, 1], -table[7, 0], 0, 0, 0, 0, 0, 0])
    table[1] = table[7] + 6e-4 * table[7].norm() / aside.norm() * aside
    wanted = nearest(_table(table), 40, [7], 6)
    assert wanted[0][0, :4].tolist() == [1, 4, 9, 12]
    unit = table / table.norm(dim=1, keepdim=True)
    exact = (unit @ unit[7]).double().numpy()
    exact[[1, 4, 7, 9, 12]] = -2
    assert wanted[0][0, 4:].tolist() == numpy.argsort(-exact)[:2].tolist()
    monkeypatch.setattr(words, "_ROWS", 3)
    assert nearest(_table(table), 40, [7], 6)[0].tolist() == wanted[0].tolist()


def test_padding_and_the_word_itself_are_left_out() -> None:
    table = _circle(0, 1, 2, 3)
    found = nearest(_table(table, 1), 4, [0], 3)
    assert found[0].tolist() == [[2, 3, -1]]
    expected = [math.cos(math.radians(2)), math.cos(math.radians(3)), 0]
    assert found[1][0].tolist() == pytest.approx(expected, abs=1e-6)


def test_many_rows_agree_with_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    table = torch.randn(500, 6)
    monkeypatch.setattr(words, "_ROWS", 130)
    monkeypatch.setattr(words, "_QUERIES", 3)
    found = nearest(_table(table), 500, list(range(10)), 4)
    unit = (table / table.norm(dim=1, keepdim=True)).double()
    score = unit[:10] @ unit.t()
    score[torch.arange(10), torch.arange(10)] = -2
    assert found[0].tolist() == score.argsort(1, descending=True)[:, :4].tolist()
