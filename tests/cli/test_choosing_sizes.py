"""Which K and D reach a size, and their order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fairseq_dpq.cli.suggest import Choice, all_choices, ranked, reaching, sample, with_errors
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.forms.quantization import fit_error
from fairseq_dpq.sizes import compact_bytes


@pytest.mark.parametrize(("K", "D", "shared"), [(8, 4, False), (5, 12, True), (300, 3, False)])
def test_bytes_are_those_of_the_form(K: int, D: int, shared: bool) -> None:
    form = CompactEmbedding(50, 12, K=K, D=D, share_subspaces=shared, packed=True)
    assert compact_bytes(50, 12, K, D, shared) == form.saved_nbytes


def test_choices_are_powers_of_two_and_common_divisors() -> None:
    """40 rows give at most 5 codes; 12 and 8 have the divisors 1, 2 and 4 in common."""
    found = all_choices([(40, 12), (90, 8)], (False,))
    assert {(c.K, c.D) for c in found} == {(K, D) for K in (2, 4) for D in (1, 2, 4)}
    one = next(c for c in found if (c.K, c.D) == (4, 4))
    # a byte a row, 4 x 12 and 4 x 8 values
    assert one.bytes == 40 + 90 + 4 * 4 * 20
    assert one.ratio == 4 * (40 * 12 + 90 * 8) / one.bytes
    assert one.flags() == "--dpq-K 4 --dpq-D 4" and one.bits == 8


def test_largest_D_of_each_K_that_fits() -> None:
    choices = all_choices([(1000, 64)], (False,))
    limit = 4 * 1000 * 64 / 16
    found = {(c.K, c.D) for c in reaching(choices, limit)}
    assert found == {(2, 64), (4, 32), (8, 32), (16, 16), (32, 8)}
    assert all(c.ratio >= 16 for c in reaching(choices, limit))
    assert reaching(choices, 100) == []


def test_error_of_planted_rows() -> None:
    """Rows of 4 groups that each take one of 2 values: K = 2, D = 4 is exact; D = 2 needs 4."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 2, 3, generator=generator)
    codes = torch.randint(2, (500, 4), generator=generator)
    rows = values[torch.arange(4), codes].reshape(500, 12)

    def error(K: int, D: int, shared: bool = False) -> float:
        return fit_error(rows, K, D, shared)

    assert error(2, 4) < 1e-10 and error(4, 2) < 1e-10 and error(8, 4, True) < 1e-10
    assert error(2, 2) > 0.05 and error(4, 4, True) > 0.01
    (found,) = with_errors([Choice(2, 2, False, 0, 0.0)], [rows, rows]).values()
    assert found.error == pytest.approx(error(2, 2))


def test_sample_leaves_out_padding() -> None:
    table = torch.randn(20_000, 4)
    table[1] = 0
    assert sample(table).shape == (8192, 4)
    assert len(sample(table[:10])) == 9
    assert torch.equal(sample(table), sample(table))


def test_order_and_reasons() -> None:
    """Errors within a tenth of the smallest are equal: small K first. What was measured leads."""
    a = Choice(64, 16, False, 1, 1.0, error=0.100)
    b = Choice(8, 32, False, 1, 1.0, error=0.108)
    c = Choice(2, 64, False, 1, 1.0, error=0.150)
    found = ranked([a, b, c])
    assert [x.K for x in found] == [8, 64, 2]
    assert [x.reason for x in found] == [
        "32 codes of 3 bits: small K, 8 % more error than the smallest",
        "16 codes of 6 bits: the smallest error of k-means",
        "64 codes of 1 bit: 50 % more error than the smallest",
    ]
    c = replace(c, measured=7.0, score="ppl 7")
    measured = ranked([replace(a, measured=6.0, score="ppl 6"), b, c])
    assert [x.K for x in measured] == [64, 2, 8]
    assert measured[0].reason == "best in the sweep: ppl 6"


def test_order_without_a_table() -> None:
    """Most bits of a symbol first, within a tenth; of those the smallest K."""
    pairs = [(2, 64), (8, 64), (64, 32), (16, 16)]  # 64, 192, 192, 64 bits
    found = ranked([Choice(K, D, False, 1, 1.0) for K, D in pairs])
    assert [(c.K, c.bits) for c in found] == [(8, 192), (64, 192), (2, 64), (16, 64)]
    assert found[0].reason == "64 codes of 3 bits: small K and large D learn best and cost least"
