"""Which D is taken where none is given, and suggested where one does not divide the size."""

from __future__ import annotations

import pytest

from fairseq_dpq.sizes import bits_note, default_D, division_problem, near_divisors


@pytest.mark.parametrize(
    ("number", "wanted", "near"),
    [(512, 48, [32, 64]), (200, 30, [25, 40]), (7, 3, [1, 7]), (1, 5, [1]), (0, 5, [])],
)
def test_near_divisors(number: int, wanted: int, near: list[int]) -> None:
    assert near_divisors(number, wanted) == near


def test_a_code_more_than_a_power_of_two_costs_a_bit() -> None:
    assert bits_note(33) == "K=33 takes 6 bits a code, as K=64 does; K=32 takes 5"
    assert bits_note(5) == "K=5 takes 3 bits a code, as K=8 does; K=4 takes 2"
    assert [K for K in range(2, 65) if not bits_note(K)] == [2, 4, 8, 16, 32, 64]


def test_division_problem() -> None:
    assert division_problem(64, 512) == ""
    assert division_problem(48, 512) == "try 32 or 64"
    assert division_problem(4, 0) == "try a positive size"


def test_default_D_divides_the_embedding_size() -> None:
    """A quarter of it; else the nearest divisor by ratio, the larger of two."""
    found = {dim: default_D(dim) for dim in (512, 200, 300, 50, 12, 37, 4, 1)}
    assert found == {512: 128, 200: 50, 300: 75, 50: 10, 12: 3, 37: 37, 4: 1, 1: 1}
    half = {dim: default_D(dim, close=True) for dim in (512, 200, 50, 12, 37)}
    assert half == {512: 256, 200: 100, 50: 25, 12: 6, 37: 37}
    assert default_D(0) == 1  # refused later
