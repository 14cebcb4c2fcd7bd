"""Calibration: what is counted and kept, what it buys at equal bytes, the correction of logits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairseq_dpq import compress
from fairseq_dpq.any_model.calibration import Knowledge, Use, calibrate
from fairseq_dpq.any_model.compress import knowledge, make_form
from fairseq_dpq.any_model.report import Lost, TableReport
from fairseq_dpq.forms.tiers import TieredEmbedding
from fairseq_dpq.model import find_tables
from helpers.any_model import PAIRS, some_ids, toy

N, SIZE = 1500, 24


class Tied(nn.Module):
    """A tied language model whose states vary in few directions, about a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(N, SIZE)
        self.mix = nn.Linear(SIZE, SIZE)
        self.out = nn.Linear(SIZE, N, bias=False)
        self.out.weight = self.embed.weight
        with torch.no_grad():
            self.mix.weight.mul_(torch.logspace(0.5, -1.5, SIZE).unsqueeze(1))

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(input_ids))) + 0.2)


def text(count: int, seed: int) -> Tensor:
    """Ids of which few are frequent, all over the table."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(9))
    return order[(torch.rand(count, 32, generator=generator) ** 4 * N).long()]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "mapping"])
def test_tokens_are_counted_and_states_kept(kind: str) -> None:
    model, ids = Tied().train(), text(6, 1)
    mask = torch.ones_like(ids)
    mask[:, 20:] = 0
    batches: list[Any] = {
        "tensor": list(ids.split(2)),
        "tuple": [(part,) for part in ids.split(2)],
        "mapping": [{"input_ids": ids, "attention_mask": mask}],
    }[kind]
    (use,) = calibrate(model, find_tables(model), batches)
    real = ids[:, :20] if kind == "mapping" else ids
    assert torch.equal(use.counts, torch.bincount(real.reshape(-1), minlength=N).float())
    assert int((use.counts > 0).sum()) == len(real.unique())
    with torch.no_grad():
        states = torch.tanh(model.mix(model.embed(real))) + 0.2
    assert torch.allclose(use.hidden(), states.reshape(-1, SIZE), atol=1e-6)
    assert (
        model.training and not model.embed._forward_pre_hooks and not model.out._forward_pre_hooks
    )


def test_states_are_thinned_not_cut() -> None:
    use = Use()
    for i in range(50):
        use.add_states(torch.full((1000, 2), float(i)))
    kept = use.hidden()
    assert 4096 < len(kept) <= 8192 and use.kept <= 16384
    assert set(kept[:, 0].tolist()) == set(map(float, range(50)))  # some of each batch


def test_all_tables_of_a_model_are_followed() -> None:
    model, ids = toy(), some_ids()
    tables = {found.path: found for found in find_tables(model)}
    token, first = calibrate(model, [tables["token"], tables["first"]], [ids])
    assert float(token.counts.sum()) == ids.numel()
    assert float(first.counts.sum()) == 3 * ids.numel() and len(first.counts) == PAIRS
    assert token.hidden() is not None and first.hidden() is None


def test_calibration_pays_at_equal_bytes() -> None:
    full = Tied().eval()
    lost = {}
    for name in ("order of ids", "counts", "text"):
        model = copy.deepcopy(full)
        how: dict[str, Any] = {
            "order of ids": {},
            "counts": {"counts": torch.bincount(text(400, 1).reshape(-1), minlength=N)},
            "text": {"calibrate": text(400, 1).split(50)},
        }[name]
        report = compress(model, min_rows=100, target_ratio=9, **how)
        assert 9 <= report.ratio < 10
        lost[name] = _output_divergence(model, full)
        if name == "text":  # what the report expects of the output is what happens to it
            told = report.tables[0].lost.divergence
            assert told == pytest.approx(lost[name], rel=0.5)
            assert (model.embed.correction is not None) and "% perplexity" in str(report)
            assert not report.uncalibrated
        else:
            assert report.uncalibrated == (name == "order of ids")
    assert lost["text"] < 0.6 * min(lost["counts"], lost["order of ids"]), lost


@torch.no_grad()
def _output_divergence(model: nn.Module, full: nn.Module) -> float:
    """That of the output table alone."""
    states = torch.tanh(full.mix(full.embed(text(40, 5)))) + 0.2
    known, found = (m.out(states).log_softmax(-1) for m in (full, model))
    return float((known.exp() * (known - found)).sum(-1).mean())


def test_correction_gives_each_row_its_mean_probability_back() -> None:
    full = Tied().eval()
    model = copy.deepcopy(full)
    compress(model, min_rows=100, target_ratio=12, calibrate=[text(128, 1)])
    with torch.no_grad():
        states = torch.tanh(full.mix(full.embed(text(128, 1)))).reshape(-1, SIZE) + 0.2
        wanted = full.out(states).softmax(-1).mean(0)
        corrected = model.out(states).softmax(-1).mean(0)
        model.embed.correction.zero_()
        plain = model.out(states).softmax(-1).mean(0)
    often = wanted > 1 / N
    off = [float((p[often] / wanted[often]).log().abs().mean()) for p in (plain, corrected)]
    assert off[1] < 0.3 * off[0]


def test_rows_that_are_never_seen_still_count() -> None:
    weight = torch.randn(N, SIZE)
    counts = torch.zeros(N)
    counts[:10] = 5
    known = Knowledge(weight, None, True, Use(counts))
    (weights,) = known.weights  # no outputs to decide by
    assert weights is not None
    assert float(weights.min()) > 0 and float(weights.sum()) == pytest.approx(1, abs=1e-4)
    assert known.few == 10
    assert Knowledge(weight, None, True, Use(torch.ones(N))).few == 0
    assert Knowledge(weight, None, True, Use(torch.zeros(N))).weights == [None]


def test_few_types_and_high_loss_are_named() -> None:
    model = Tied().eval()
    report = compress(model, min_rows=100, target_ratio=25, calibrate=[text(2, 1)[:, :8]])
    told = str(report)
    assert "types; other text may lose more" in told
    assert "embed: the model will suffer from this loss; try target_ratio=" in told
    assert "int8 would have ratio" in told
    better = float(told.split("try target_ratio=")[1].split()[0])
    assert 2 < better < 25
    assert "will suffer" not in str(compress(Tied(), min_rows=100, target_ratio=5))


def test_explicit_tiers() -> None:
    model = Tied().eval()
    tiers = [(100, 64, 24), (900, 16, 8), (500, 1, 1)]
    report = compress(model, min_rows=100, tiers=tiers)
    table = model.embed
    assert isinstance(table, TieredEmbedding) and table.sizes == tiers
    rows = 100 * 24 * 6 // 8 + 900 * 4 + 1
    assert report.after == rows + 2 * SIZE * (64 + 16 + 1) + 4  # values in 16 bits, one float
    assert torch.equal(table(torch.tensor([1000])), table(torch.tensor([N - 1])))


def test_a_table_that_an_encoder_reads_weighs_rare_rows_more() -> None:
    """There an error of the plain row counts as much as one of the logits."""
    torch.manual_seed(0)
    table, states = torch.randn(40, 8), torch.randn(300, 8) * torch.linspace(0.2, 2, 8)
    counts = torch.arange(40, 0, -1).float().pow(2)
    one, two = (
        Knowledge(table, None, True, Use(counts, [states], 1, 300), readers) for readers in (1, 2)
    )
    (whole, root), (other,) = one.weights, two.weights
    assert whole.sum().item() == pytest.approx(1) == other.sum().item()
    assert whole[0] / whole[-1] > 1.5 * other[0] / other[-1] > 1
    torch.testing.assert_close(root, other)
    lone, both = (known.metric.diagonal() for known in (one, two))
    assert lone.max() / lone.min() > 2 * both.max() / both.min() > 2


@pytest.mark.parametrize(("sure", "masked"), [(False, False), (True, False), (True, True)])
def test_the_outputs_decide_how_much_use_weighs(sure: bool, masked: bool) -> None:
    """Where a model is sure of its words, rare ones matter more than their use says. A word that a
    bias of -inf rules out says nothing."""
    torch.manual_seed(0)
    n, d = 3000, 32
    model, counts = nn.Module(), 1 / (torch.arange(n) + 3.0).pow(1 if sure else 1.5)
    model.embed, model.out = nn.Embedding(n, d), nn.Linear(d, n)
    model.out.weight = model.embed.weight
    table = model.embed.weight.detach()
    with torch.no_grad():
        model.out.bias.copy_(0 * counts if sure else counts.log())
        model.out.bias[:masked] = -torch.inf
    said = table[torch.multinomial(counts, 4000, replacement=True)]
    states = torch.randn(4000, d) * 0.3 + 8 * sure * said / d**0.5
    use, better = Use(counts, [states], 1, 4000), int(sure)
    (found,) = find_tables(model)
    known = knowledge(found, use)
    both = []
    for weight in known.weights:
        how = {"weight": weight, "metric": known.metric, "corrected": True}
        form = TieredEmbedding.from_table(table, ratio=14.0, **how)
        both.append((known.correct(form, table), form))
    chosen = make_form(found, TieredEmbedding, {"ratio": 14.0}, known)
    assert known.divergence == both[better][0] < 0.6 * both[1 - better][0]
    assert torch.equal(chosen.dense(), both[better][1].dense())


def test_states_that_are_not_finite_are_left_out() -> None:
    class Broken(Tied):
        bad = 1.0  # share of the texts whose states hold NaN

        def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Tensor:
            states = torch.tanh(self.mix(self.embed(input_ids)))
            states[: int(len(states) * self.bad), :, 3] = torch.nan
            return self.out(states)

    model, ids = Broken(), text(64, 3)
    with pytest.raises(ValueError, match="calibrate: the model computes NaN or infinite numbers"):
        compress(model, calibrate=ids.split(8), min_rows=0)
    model.bad = 0.5
    (use,) = calibrate(model, find_tables(model), ids.split(8))
    assert use.broken == use.kept == 32 * 32 and bool(use.hidden().isfinite().all())
    (table,) = compress(model, calibrate=ids.split(8), min_rows=0).tables
    assert 0 < table.lost.divergence < 7


def test_a_loss_that_nobody_can_tell_is_a_warning() -> None:
    for divergence, said in ((math.nan, "no use any more"), (800.0, "no use any more")):
        lost = Lost(0.1, 0.01, divergence, 0)
        assert said in str(lost)
        (line,) = TableReport("a", 100, 8, "", 3200, 400, lost).warnings()
        assert line == "the model will suffer from this loss; try method='scalar', bits=8"


def test_a_decoder_with_two_names_reads_its_table_once() -> None:
    decoder = Tied()
    (found,) = find_tables(nn.ModuleDict({"model": decoder, "decoder": decoder}))
    assert len(found.paths) == 2 and len(found.readers) == 1
    encoder = nn.ModuleDict({"embed": decoder.embed})
    (found,) = find_tables(nn.ModuleDict({"encoder": encoder, "decoder": decoder}))
    assert len(found.readers) == 2
