"""distill: the loss falls, only tables change, padding stays zero, a killed run continues."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairseq_dpq import DPQEmbedding, compact, compress, distill, load_compact, save_compact

PAD, ROWS, SIZE = 1, 200, 16


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Model(nn.Module):
    """Two layers in a ModuleList, dropout, an output tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, SIZE, padding_idx=PAD)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.output = nn.Linear(SIZE, ROWS)
        self.output.weight = self.table.weight

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Output:
        h = self.table(tokens)
        for layer in self.layers:
            h = self.drop(h + layer(h).tanh())
        return Output(self.output(h))


def batches(count: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    out = []
    for _ in range(count):
        tokens = torch.randint(2, ROWS, (4, 6), generator=generator)
        tokens[0, 4:] = PAD
        out.append({"tokens": tokens, "attention_mask": (tokens != PAD).long()})
    return out


def pair(**settings: Any) -> tuple[Model, Model]:
    teacher = Model()
    model = copy.deepcopy(teacher)
    sizes = {} if "bits" in settings else {"K": 4, "D": 4}
    compress(model, which="table", **sizes, **settings)
    return model, teacher


SETTINGS: list[dict[str, Any]] = [
    {},
    {"method": "scalar", "bits": 2},
    {"trainable": True},
    {"trainable": True, "method": "sx"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_only_tables_are_trained(settings: dict[str, Any], tmp_path: Path) -> None:
    model, teacher = pair(**settings)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    full = copy.deepcopy(teacher.state_dict())
    losses = distill(model, teacher, batches(), updates=60, lr=0.05, progress=False)
    assert len(losses) == 60 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert model.training and model.drop.training and teacher.drop.training
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(full[key], tensor) for key, tensor in teacher.state_dict().items())
    for key, tensor in model.layers.state_dict().items():
        assert torch.equal(tensor, full[f"layers.{key}"])
    assert not torch.equal(model.output.bias, teacher.output.bias)
    assert not bool(model.table(torch.tensor([PAD])).any())
    if settings.get("trainable"):
        compact(model)
    assert not any(buffer.requires_grad for buffer in model.buffers())
    model.eval()
    save_compact(model, tmp_path)
    tokens = batches()[0]["tokens"]
    loaded = load_compact(tmp_path, Model().eval())
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_the_distribution_comes_near() -> None:
    """By the divergence worked out here, on tokens that count."""
    model, teacher = pair()

    @torch.no_grad()
    def divergence() -> float:
        total = 0.0
        for batch in batches():
            p, q = (m.eval()(**batch).logits.log_softmax(-1) for m in (teacher, model))
            each = (p.exp() * (p - q)).sum(-1)
            total += float(each[batch["attention_mask"].bool()].mean()) / 5
        return total

    before = divergence()
    losses = distill(model, teacher, batches(), updates=5, hidden=0, lr=0, progress=False)
    assert sum(losses) / 5 == pytest.approx(before, rel=1e-4)
    distill(model, teacher, batches(), updates=60, hidden=0, lr=0.05, progress=False)
    assert divergence() < 0.7 * before


def test_the_ramp_starts_at_the_full_rows() -> None:
    model, teacher = pair(trainable=True, warmup_updates=1, ramp_updates=20)
    losses = distill(model, teacher, batches(), updates=40, progress=False)
    plain, _ = pair(trainable=True)
    right = distill(plain, teacher, batches(), updates=40, progress=False)
    assert losses[0] < 0.01 and losses[5] < 0.5 * right[5] and losses[-1] > 0.5 * right[-1]


class Killed(Exception):
    pass


@pytest.mark.skipif(torch.__version__ < "1.13", reason="needs weights_only=True")
@pytest.mark.parametrize("settings", [{}, {"trainable": True}])
def test_continues_from_its_state(settings: dict[str, Any], tmp_path: Path) -> None:
    whole, teacher = pair(**settings)
    distill(whole, teacher, batches(), updates=12, progress=False)

    def failing() -> Any:
        yield from batches()
        yield batches()[0]
        raise Killed

    class Once:
        """Fails in its seventh batch."""

        def __iter__(self) -> Any:
            return failing()

    again, _ = pair(**settings)
    how: dict[str, Any] = {"updates": 12, "progress": False, "state": tmp_path / "state"}
    with pytest.raises(Killed):
        distill(again, teacher, Once(), save_every=4, **how)
    fresh, _ = pair(**settings)
    losses = distill(fresh, teacher, batches(), **how)
    assert len(losses) == 8
    mine, theirs = whole.state_dict(), fresh.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert distill(fresh, teacher, batches(), **how) == []
    with pytest.raises(ValueError, match="is of another model or number of updates; remove it"):
        distill(fresh, teacher, batches(), **{**how, "updates": 13})


def test_everything_and_refusals() -> None:
    model, teacher = pair()
    before = model.layers[0].weight.clone()
    distill(model, teacher, batches(), updates=2, everything=True, progress=False)
    assert not torch.equal(model.layers[0].weight, before)
    assert isinstance(pair(trainable=True)[0].table, DPQEmbedding)
    for arguments, why in (
        ((teacher, teacher, batches(), 1), r"no compressed table; call compress\(model\) first"),
        ((model, teacher, batches(), 0), "updates=0: give 1 or more"),
        ((model, teacher, [], 1), "batches is empty"),
    ):
        *first, updates = arguments
        with pytest.raises(ValueError, match=why):
            distill(*first, updates=updates, progress=False)  # type: ignore[misc]


def test_values_of_16_bits_stay() -> None:
    """They are trained in 32 bits, the correction of logits too."""
    teacher = Model()
    model = copy.deepcopy(teacher)
    compress(model, which="table", tiers=[(50, 16, 8), (150, 4, 4)], calibrate=batches())
    values = [tier.values for tier in model.table.tiers]
    assert model.table.correction is not None and values[0].dtype == torch.float16
    correction = model.table.correction.clone()
    losses = distill(model, teacher, batches(), updates=40, lr=0.05, progress=False)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    for tier, before in zip(model.table.tiers, values):
        assert tier.values.dtype == torch.float16 and not torch.equal(tier.values, before)
    assert model.table.correction.dtype == torch.float16
    assert not torch.equal(model.table.correction, correction)
    with pytest.raises(ValueError, match=r"16-bit weights; call model.float\(\) before distill"):
        distill(model.half(), teacher, batches(), updates=1, progress=False)
