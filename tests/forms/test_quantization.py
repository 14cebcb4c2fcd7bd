"""Which D would lose less of a table, worked out on some of its rows."""

from __future__ import annotations

import pytest
import torch

from fairseq_dpq.forms.quantization import HIGH_ERROR, better_D, fit_error


def test_the_error_of_a_sample_by_hand() -> None:
    """Two groups of one number; K = 2 keeps 0 and 4 of the first, and halves 1 and 3 to 2."""
    rows = torch.tensor([[0.0, 1.0], [4.0, 3.0], [0.0, 1.0], [4.0, 3.0]])
    assert fit_error(rows, 2, 2, False) == 0
    assert fit_error(rows, 2, 1, False) == 0
    # One centroid for all numbers of both groups: 0, 1, 3, 4 around 0.5 and 3.5
    shared = fit_error(rows, 2, 2, True)
    assert shared == pytest.approx(8 * 0.25 / 52)


def test_the_smallest_D_that_is_good_enough() -> None:
    """A normal distribution with K = 4: 16 numbers at once lose most, one number 12 %."""
    torch.manual_seed(0)
    table = torch.randn(600, 16)
    errors = {D: fit_error(table, 4, D, False) for D in (1, 2, 4, 8, 16)}
    assert errors[1] > 0.75 and errors[16] < 0.13
    want = next(D for D in (2, 4, 8, 16) if errors[D] < HIGH_ERROR)
    found = better_D(table, 4, 1, False, None)
    assert found is not None and found.settings == {"D": want} == {"D": 16}
    assert found.error == pytest.approx(errors[16], abs=0.01)
    assert found.ratio == 32 * 600 * 16 / (600 * 16 * 2 + 32 * 4 * 16)
    assert better_D(table, 4, 16, False, None) is None


def test_padding_is_left_out() -> None:
    table = torch.zeros(5, 4)
    table[1] = 1e6
    table[2:] = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    found = better_D(table, 2, 1, False, 1)
    assert found is not None and found.error < 1e-9
