"""Tiers: where rows are, what they take, what they lose; codes in a metric; the choice of tiers."""

from __future__ import annotations

import contextlib
from typing import Iterator

import pytest
import torch
from torch import Tensor

from fairseq_dpq.files.reader import read_form
from fairseq_dpq.files.writer import write_form
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.choosing_tiers import choose_tiers, tier_bytes
from fairseq_dpq.forms.fitting import build_form
from fairseq_dpq.forms.quantization import metric_gain, quantize_in_metric
from fairseq_dpq.forms.tiers import TieredEmbedding, id_order

N, DIM, PAD = 600, 12, 3
TIERS = [(100, 64, 12), (300, 16, 6), (200, 1, 1)]


def table(seed: int = 0) -> Tensor:
    return torch.randn(N, DIM, generator=torch.Generator().manual_seed(seed))


def use(seed: int = 1) -> Tensor:
    return torch.rand(N, generator=torch.Generator().manual_seed(seed)) ** 3


def tiered(in_order: bool = False, **more) -> TieredEmbedding:
    weight = None if in_order else use()
    return TieredEmbedding.from_table(table(), PAD, tiers=TIERS, weight=weight, **more)


def test_rows_by_hand() -> None:
    """Each row is the value rows of its codes, at its place in its tier."""
    form = tiered()
    dense = form.dense()
    seen = [0, 0, 0]
    for i in range(N):
        tier = int(form.tier_of[i])
        part = form.tiers[tier]
        codes = part.unpacked_codes()[0 if tier == 2 else seen[tier]].long()
        D, K = part.D, TIERS[tier][1]
        values = part.values.view(D, K, DIM // D)
        row = values[torch.arange(D), codes].reshape(-1).float()
        assert torch.equal(dense[i], torch.zeros(DIM) if i == PAD else row)
        seen[tier] += 1
    assert seen == [100, 300, 200]


def test_rows_that_are_used_have_the_bits() -> None:
    form = tiered()
    cost = use() * (table() - (table() * use()[:, None]).sum(0) / use().sum()).pow(2).sum(1)
    cost[PAD] = 0
    worst_kept = cost[form.tier_of == 0].min()
    assert worst_kept >= cost[form.tier_of == 1].max() >= cost[form.tier_of == 1].min()
    error = (form.dense() - table()).pow(2).sum(1)
    by_tier = [float(error[form.tier_of == i].mean()) for i in range(3)]
    assert by_tier[0] < 0.1 * by_tier[1] < 0.5 * by_tier[2]


@pytest.mark.parametrize("in_order", [True, False])
def test_bytes_and_the_row_that_is_shared(in_order: bool) -> None:
    form = tiered(in_order)
    codes = 100 * 12 * 6 // 8 + 300 * 6 * 4 // 8 + 1
    values = 2 * DIM * (64 + 16 + 1)
    assert form.saved_nbytes == codes + values + 4 + (0 if in_order else N)
    assert (form.tier_of is None) == in_order
    last = torch.arange(400, N) if in_order else (form.tier_of == 2).nonzero().flatten()
    last = last[last != PAD]
    rows = form(last)
    assert bool((rows == rows[0]).all()) and bool(rows[0].any())
    weight = (id_order(N) if in_order else use())[last]
    mean = (table()[last] * weight[:, None]).sum(0) / weight.sum()
    assert torch.allclose(rows[0], mean, atol=2e-3)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("library", [True, False])
def test_lookup_is_that_of_pytorch(in_order: bool, library: bool, monkeypatch) -> None:
    form = tiered(in_order)
    dense = form.dense()
    if not library:
        monkeypatch.setattr(TieredEmbedding, "_library", lambda self: None)
    generator = torch.Generator().manual_seed(2)
    for shape in ((1,), (7, 3), (2, 400), (0,)):
        ids = torch.randint(N, shape, generator=generator)
        assert torch.equal(form(ids), dense[ids]) and torch.equal(form(ids.int()), dense[ids])
    for wrong in ([N], [-1], [0, N], [5, -1]):
        with pytest.raises(IndexError):
            form(torch.tensor(wrong))
    h = torch.randn(2, 3, DIM, generator=generator)
    assert torch.allclose(form.logits(h), h @ dense.t(), atol=1e-4)
    if hasattr(torch, "export"):
        assert torch.equal(torch.jit.script(form)(torch.arange(N)), dense)
        exported = torch.export.export(form, (torch.arange(40),)).module()
        assert torch.equal(exported(torch.arange(40)), dense[:40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_and_logits_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    """Values stay float16; the library widens them to float32 as it copies them."""
    form = tiered(False).to(dtype)
    form.correction = torch.linspace(-1, 1, N).half()
    ids = torch.arange(N)
    fast = form(ids)
    h = torch.randn(5, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits = form.logits(h)
    assert fast.dtype == logits.dtype == dtype and form.tiers[0].values.dtype == torch.float16
    with monkeypatched_library():
        assert torch.equal(fast, form(ids))
        slow = form.logits(h).float()
        assert (logits.float() - slow).abs().max() < 2 * torch.finfo(dtype).eps * slow.abs().max()


@contextlib.contextmanager
def monkeypatched_library() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TieredEmbedding, "_library", lambda self: None)
        yield


def test_gradients_reach_values_by_lookup_and_logits() -> None:
    ids = torch.tensor([0, 5, 9, 300, 599])
    for use_of in (lambda f: f(ids), lambda f: f.logits(torch.ones(DIM))):
        form = tiered()
        form(ids)  # by the library, which is prepared for these values
        for part in form.tiers:
            part.values = part.values.float().requires_grad_()
        use_of(form).sum().backward()
        assert all(part.values.grad is not None for part in form.tiers[:2])


def test_correction_is_added_to_logits_and_saved(tmp_path) -> None:
    form = tiered()
    plain = form.logits(torch.ones(DIM))
    form.correction = torch.linspace(-1, 1, N).half()
    assert torch.equal(form.logits(torch.ones(DIM)), plain + form.correction.float())
    path = tmp_path / "table.safetensors"
    write_form(path, form, "table")
    other = read_form(path, FORMS)
    assert torch.equal(other.logits(torch.ones(DIM)), form.logits(torch.ones(DIM)))
    third = TieredEmbedding(N, DIM, PAD, **form.settings())
    third.load_state_dict(form.state_dict())
    assert torch.equal(third.logits(torch.ones(DIM)), form.logits(torch.ones(DIM)))
    assert torch.equal(third.dense(), form.dense())


def test_values_stay_whatever_the_dtype_of_the_model() -> None:
    form, dense = tiered(), tiered().dense()
    form.bfloat16()
    assert (
        form(torch.arange(3)).dtype is torch.bfloat16 and form.tiers[0].values.dtype is torch.half
    )
    assert torch.equal(form.float().dense(), dense)
    cast = {
        k: t.bfloat16() if t.is_floating_point() else t for k, t in form.export_tensors().items()
    }
    other = TieredEmbedding.from_tensors(N, DIM, PAD, form.settings(), cast)
    assert other.dense().dtype is torch.bfloat16
    assert torch.allclose(other.dense().float(), dense, rtol=1e-2)


@pytest.mark.parametrize("in_order", [True, False])
def test_new_rows_join_the_first_tier(in_order: bool) -> None:
    form = tiered(in_order)
    form.correction = torch.ones(N).half()
    new = table(7)[:20]
    grown = form.with_rows(new)
    assert torch.equal(grown.dense()[:N], form.dense())
    assert float((grown.dense()[N:] - new).pow(2).mean()) < 0.1
    assert grown.sizes[0] == (120, 64, 12) and not grown.correction[N:].any()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda s, t: s["tiers"].pop(), "they have 400 rows, the table 600"),
        (lambda s, t: s["tiers"].__setitem__(0, [100, 64]), "three numbers"),
        (lambda s, t: s["tiers"].__setitem__(0, [100, True, 12]), "three numbers"),
        (lambda s, t: s["tiers"].__setitem__(0, [100, 64, 5]), "D divides 12"),
        (lambda s, t: s["tiers"].__setitem__(2, [200, 1, 2]), "is 1 where K is 1"),
        (lambda s, t: t["tier_of"].__setitem__(0, 9), "tier_of: the tiers have"),
        (lambda s, t: t.pop("tier_of"), "tier_of is missing"),
        (lambda s, t: t.pop("tiers.1.codes"), "tiers.1.codes is missing"),
        (lambda s, t: t.update({"tiers.1.values": t["tiers.1.values"][:6]}), "tiers.1"),
        (lambda s, t: t.update(correction=torch.ones(N - 1)), "correction"),
        (lambda s, t: t.update({"tiers.3.codes": t["tier_of"]}), "has no tensor"),
    ],
)
def test_damaged_files(damage, why: str) -> None:
    form = tiered()
    settings, tensors = form.settings(), {k: t.clone() for k, t in form.export_tensors().items()}
    damage(settings, tensors)
    with pytest.raises(ValueError, match=why):
        build_form(TieredEmbedding, (N, DIM, PAD), settings, tensors)


# Codes in a metric --------------------------------------------------------------------------------


def rebuilt(codes: Tensor, values: Tensor) -> Tensor:
    return values[torch.arange(values.shape[0]), codes.long()].flatten(1).float()


def skewed() -> Tensor:
    basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(4)))[0]
    return basis @ torch.diag(torch.logspace(1, -2, DIM)) @ basis.t()


def test_groups_make_up_for_each_other() -> None:
    """By hand: the error in the metric is a third of that of plain codes of the same size."""
    rows, metric = table(), skewed()
    plain = rows - rebuilt(*quantize_in_metric(rows, 16, 6))
    aware = rows - rebuilt(*quantize_in_metric(rows, 16, 6, metric=metric))

    def cost(error: Tensor) -> float:
        return float(((error @ metric) * error).sum())

    assert cost(aware) < 0.4 * cost(plain)
    assert float(aware.pow(2).sum()) > float(plain.pow(2).sum())
    assert cost(aware) / cost(plain) == pytest.approx(metric_gain(metric, torch.eye(DIM)), rel=0.5)


def test_codes_are_the_best_of_each_group_after_those_before_it() -> None:
    rows, metric = table()[:200], skewed()
    codes, values = quantize_in_metric(rows, 8, 3, metric=metric)
    size = DIM // 3
    inverse = torch.linalg.inv(metric.double())
    for row, own in zip(rows[:20].double(), codes[:20]):
        error = torch.zeros(DIM, dtype=torch.float64)
        for j in range(3):
            here = slice(j * size, (j + 1) * size)
            costs = []
            for value in values[j].double():
                trial = error.clone()
                trial[here] = row[here] - value
                fixed = trial[: here.stop]  # the rest is free: it takes what is best for all
                costs.append(fixed @ torch.linalg.inv(inverse[: here.stop, : here.stop]) @ fixed)
            assert float(costs[int(own[j])]) == pytest.approx(float(min(costs)), rel=1e-3)
            error[here] = row[here] - values[j, int(own[j])].double()


def test_weights_draw_values() -> None:
    rows = torch.cat([torch.zeros(300, 1), torch.linspace(5, 6, 300).unsqueeze(1)])
    weight = torch.cat([torch.full((300,), 1e-6), torch.ones(300)])
    _, plain = quantize_in_metric(rows, 4, 1)
    _, aware = quantize_in_metric(rows, 4, 1, weight=weight)
    assert int((aware > 4).sum()) >= 3 >= int((plain > 4).sum())


def test_progress_counts_to_its_end() -> None:
    steps: list[int] = []
    TieredEmbedding.from_table(table(), tiers=TIERS, progress=steps.append)
    assert len(steps) == TieredEmbedding.work({})


# The choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [8, 10, 18])
def test_chosen_tiers_fit_and_are_better_than_one(ratio: int) -> None:
    n, d = 20_000, 96
    importance = id_order(n) * n
    budget = 4 * n * d // ratio
    tiers = choose_tiers(importance, d, budget)
    assert sum(rows for rows, _, _ in tiers) == n
    taken = sum(tier_bytes(tier, d) for tier in tiers)
    assert 0.85 * budget < taken <= budget
    bits = [0 if K == 1 else D * (K - 1).bit_length() for _, K, D in tiers]
    assert bits == sorted(bits, reverse=True) and len(set(bits)) > 2


@pytest.mark.parametrize(("ratio", "codes"), [(12, True), (20, True), (40, True), (300, False)])
def test_rows_that_are_used_have_codes_and_small_tables_use_their_bytes(
    ratio: int, codes: bool
) -> None:
    """A byte's price alone left a quarter of the bytes of a small table, and rows without codes."""
    n, d = (1544, 64) if codes else (10_000, 64)
    budget = 4 * n * d // ratio
    tiers = choose_tiers(torch.linspace(1, 0.01, n), d, budget)
    assert all(K > 1 for _, K, _ in tiers) == codes
    assert 0.9 * budget < sum(tier_bytes(tier, d) for tier in tiers) <= budget


def test_a_ratio_without_room_for_codes_is_refused() -> None:
    for budget in (10, 41, 241):
        with pytest.raises(ValueError, match=f"300 x 8: {budget} bytes leave no room for codes"):
            choose_tiers(torch.ones(300), 8, budget)
    with pytest.raises(ValueError, match="5000 x 16: 33 bytes leave no room"):
        choose_tiers(torch.cat([torch.ones(10), torch.zeros(4990)]), 16, 33)
    with pytest.raises(ValueError, match="leave no room"):  # two rows for all is no compression
        choose_tiers(id_order(6000), 97, 4 * 6000 * 97 // 200)


def test_of_two_choices_with_one_error_the_smaller_is_taken() -> None:
    """A row without weight, the padding's, is not worth a tier of its own."""
    importance = torch.cat([torch.linspace(1.5, 0.5, 299), torch.zeros(1)])
    assert choose_tiers(importance, 64, 4 * 300 * 64 // 3 - 900) == [(300, 64, 64)]


@pytest.mark.parametrize(("ratio", "merged"), [(30, False), (64, True), (70, True)])
def test_rare_rows_become_one_before_all_codes_get_too_short(ratio: int, merged: bool) -> None:
    """Where the shortest codes only just fit, they cost the others most of theirs."""
    n, d = 10_000, 200
    tiers = choose_tiers(id_order(n), d, 4 * n * d // ratio)
    assert (tiers[-1][1:] == (1, 1)) == merged and len(tiers) > 2


def test_a_table_whose_rows_are_alike_has_one_tier() -> None:
    assert len(choose_tiers(torch.ones(1000), 32, 4 * 1000 * 32 // 3)) == 1
    assert choose_tiers(id_order(256), 32, 4681) == [(256, 32, 16)]
    # Rows that were not seen, too, have codes, the shortest that fit.
    most = choose_tiers(torch.cat([id_order(50_000), torch.zeros(10_000)]), 576, 9_900_000)
    assert len(most) <= 5 and all(K > 1 for _, K, _ in most)
    assert [D for _, _, D in most] == sorted((D for _, _, D in most), reverse=True)


def test_ratio_of_the_whole() -> None:
    for more in ({}, {"weight": use()}, {"weight": use(), "corrected": True}):
        form = TieredEmbedding.from_table(
            table().repeat(5, 1)[:, :8],
            ratio=7,
            **({k: v.repeat(5) if k == "weight" else v for k, v in more.items()}),
        )
        if more.get("corrected"):
            form.correction = torch.zeros(5 * N).half()
        assert 7 <= form.compression_ratio() < 9
