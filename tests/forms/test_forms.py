"""Every stored form: lookup, bytes, state_dict, files, scripting; rows worked out in the test."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.reader import read_form
from fairseq_dpq.files.writer import write_form
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.additive_codes import AdditiveEmbedding, fit_vectors
from fairseq_dpq.forms.low_rank import LowRankEmbedding
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.forms.scalar import ScalarEmbedding

CASES = [
    ("product_codes", {"K": 5, "D": 4}),
    ("product_codes", {"K": 8, "D": 3, "share_subspaces": True}),
    ("scalar", {"bits": 8}),
    ("scalar", {"bits": 6, "by_row": False}),
    ("scalar", {"bits": 3}),
    ("scalar", {"bits": 2}),
    ("scalar", {"bits": 4, "group": 4}),
    ("low_rank", {"rank": 4}),
    ("tiers", {"tiers": [[10, 16, 12], [20, 4, 3], [10, 1, 1]]}),
    ("additive_codes", {"K": 5, "D": 4, "steps": 50}),
]
PARAMETERS = pytest.mark.parametrize(
    ("kind", "settings"), CASES, ids=["-".join(map(str, [k, *s.values()])) for k, s in CASES]
)
N, DIM, PAD = 40, 12, 1


def make(kind: str, settings: dict, pad: int | None = PAD):
    torch.manual_seed(0)
    return FORMS[kind].from_table(torch.randn(N, DIM), pad, **settings)


def test_every_listed_form_is_tested() -> None:
    assert {kind for kind, _ in CASES} == set(FORMS)


@PARAMETERS
def test_lookup_dense_and_padding(kind: str, settings: dict) -> None:
    form = make(kind, settings)
    dense = form.dense()
    assert dense.shape == (N, DIM) and not dense[PAD].any()
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([[3, PAD, 39], [0, 3, 7]], dtype=dtype)
        torch.testing.assert_close(form(ids), dense[ids.long()], rtol=0, atol=1e-6)
    assert torch.equal(form.weight, dense) and form(torch.zeros(0, 2).long()).shape == (0, 2, DIM)
    for wrong in (N, -1):
        with pytest.raises(IndexError):
            form(torch.tensor([wrong]))


@PARAMETERS
def test_state_dict_bytes_and_settings(kind: str, settings: dict) -> None:
    form = make(kind, settings)
    state = form.state_dict()
    assert form.saved_nbytes == sum(t.numel() * t.element_size() for t in state.values())
    assert form.nbytes >= sum(b.numel() * b.element_size() for b in form.buffers())
    assert form.compression_ratio() == 4 * N * DIM / form.saved_nbytes
    kept = {name: value for name, value in settings.items() if name != "steps"}
    assert kept.items() <= form.settings().items() and form.signature_tensor in state
    other = FORMS[kind](N, DIM, PAD, **form.settings())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other.dense(), form.dense())
    assert repr(form).startswith(f"{type(form).__name__}(40, 12, padding_idx=1, ")
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|needs|40 rows"):
        FORMS[kind](N + 1, DIM, PAD, **form.settings()).load_state_dict(form.state_dict())


@PARAMETERS
def test_file_round_trip(kind: str, settings: dict, tmp_path) -> None:
    form = make(kind, settings)
    path = tmp_path / "table.safetensors"
    write_form(path, form, "table")
    assert torch.equal(read_form(path, FORMS).dense(), form.dense())
    others = {k: v for k, v in FORMS.items() if k != kind}
    with pytest.raises(CheckpointError, match=f"holds a table of kind {kind}, not"):
        read_form(path, others)


@PARAMETERS
def test_torchscript(kind: str, settings: dict) -> None:
    form, new = make(kind, settings), not torch.__version__.startswith("1.")
    ids = torch.tensor([[3, PAD], [5, 0]])
    if kind != "tiers" or new:  # tables of tables are beyond the older TorchScript
        found = torch.jit.script(form)(ids)
        torch.testing.assert_close(found, form(ids), rtol=0, atol=0 if new else 1e-6)


@PARAMETERS
def test_half_precision_values(kind: str, settings: dict) -> None:
    form = make(kind, settings)
    small = make(kind, settings).half()
    assert small.dense().dtype == torch.float16
    torch.testing.assert_close(small.dense().float(), form.dense(), rtol=2e-2, atol=2e-2)


# One form at a time -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("by_row", [True, False])
def test_scalar_rows_by_numpy(bits: int, by_row: bool) -> None:
    table = torch.randn(30, 7) * 3
    form = ScalarEmbedding.from_table(table, bits=bits, by_row=by_row)
    x = table.numpy()
    low = x.min(1, keepdims=True) if by_row else x.min()
    high = x.max(1, keepdims=True) if by_row else x.max()
    scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float32)
    wanted = np.round((x - low) / scale) * scale + low
    np.testing.assert_allclose(form.dense().numpy(), wanted, atol=1e-5)
    assert np.abs(form.dense().numpy() - x).max() <= scale.max() / 2 + 1e-5
    row_bytes = -(-7 * bits // 8)
    assert form.saved_nbytes == 30 * row_bytes + 8 * (30 if by_row else 1)
    assert form.formula_bits() == 30 * 7 * bits + 64 * (30 if by_row else 1)


def test_scalar_of_a_constant_table_and_bad_bits() -> None:
    form = ScalarEmbedding.from_table(torch.full((4, 3), 2.5), bits=4)
    assert torch.equal(form.dense(), torch.full((4, 3), 2.5))
    for bits in (1, 9):
        with pytest.raises(ValueError, match=f"bits={bits}: must be from 2 to 8"):
            ScalarEmbedding(4, 3, bits=bits)


def test_low_rank_is_the_best_of_its_rank() -> None:
    """Eckart and Young: the error is that of the singular values that were left out."""
    table = torch.randn(50, 10)
    singular = torch.linalg.svdvals(table)
    for rank in (1, 4, 10):
        form = LowRankEmbedding.from_table(table, rank=rank)
        error = (form.dense() - table).pow(2).sum()
        torch.testing.assert_close(error, singular[rank:].pow(2).sum(), rtol=1e-3, atol=1e-6)
        assert form.formula_bits() == 32 * rank * 60 and form.saved_nbytes == 4 * rank * 60
    with pytest.raises(ValueError, match="rank=11: must be from 1 to the embedding size 10"):
        LowRankEmbedding(50, 10, rank=11)


@pytest.mark.parametrize("width", [0, 5])
def test_additive_rows_by_numpy(width: int) -> None:
    torch.manual_seed(3)
    n, d, K, D = 30, 7, 6, 4
    codes = torch.randint(K, (n, D))
    values, bias = torch.randn(D, K, width or d), torch.randn(d)
    matrix = torch.randn(width, d) if width else torch.zeros(0, 0)
    form = AdditiveEmbedding.from_codes(codes, values, matrix, bias, 2)
    wanted = sum(values[j].numpy()[codes[:, j].numpy()] for j in range(D))
    wanted = (wanted @ matrix.numpy() if width else wanted) + bias.numpy()
    wanted[2] = 0
    np.testing.assert_allclose(form.dense().numpy(), wanted, atol=1e-5)
    numbers = D * K * (width or d) + width * d + d
    assert form.formula_bits() == n * D * 3 + 32 * numbers
    assert form.saved_nbytes == n * 2 + 4 * numbers
    assert torch.equal(form.unpacked_codes(), codes.to(torch.uint8))
    # A row has the same bits alone and in the whole table.
    assert torch.equal(torch.cat([form(torch.tensor([i])) for i in range(n)]), form.dense())


def test_additive_codes_find_a_table_that_has_them() -> None:
    """A table made of additive codes; product codes of as many bits have no such rows."""
    torch.manual_seed(4)
    vectors = torch.randn(3, 4, 10)
    codes = torch.randint(4, (300, 3))
    table = vectors[0][codes[:, 0]] + vectors[1][codes[:, 1]] + vectors[2][codes[:, 2]]
    form = AdditiveEmbedding.from_table(table, None, K=4, D=3, steps=1000)
    product = CompactEmbedding.from_table(table, None, K=8, D=2)
    assert form.bits_per_symbol() == product.bits_per_symbol() == 6
    error, other = (
        float((rows - table).pow(2).sum() / table.pow(2).sum())
        for rows in (form.dense(), product.dense())
    )
    assert error < 0.2 < 0.25 < other
    used = [len(group.unique()) for group in form.unpacked_codes().t()]
    assert form.codes_in_use()["used"].tolist() == used and min(used) >= 3


def test_fitted_vectors_are_the_least_squares_solution() -> None:
    torch.manual_seed(5)
    table, codes = torch.randn(50, 6), torch.randint(3, (50, 2))
    used = torch.zeros(50, 6).scatter_(1, codes + torch.tensor([0, 3]), 1)
    wanted = used.numpy() @ np.linalg.lstsq(used.numpy(), table.numpy(), rcond=None)[0]
    found = fit_vectors(table, codes, 3)
    rows = found[0][codes[:, 0]] + found[1][codes[:, 1]]
    np.testing.assert_allclose(rows.numpy(), wanted, atol=1e-3)
