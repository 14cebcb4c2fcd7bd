"""The warm start: a plain table, k-means, a ramp; and one code for a token in training."""

from __future__ import annotations

import copy

import pytest
import torch

from fairseq_dpq import DPQEmbedding, collect_regularizer, native
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.methods.base import TableUse, make_options

VQ = {"method": "vq", "ema_decay": 0.9}
SX = {"method": "sx"}
N, SIZE = 60, 8


def make(**options: object) -> DPQEmbedding:
    torch.manual_seed(1)
    return DPQEmbedding(N, SIZE, 1, K=4, D=2, **options)


def train(layer: DPQEmbedding, optimizer: torch.optim.Optimizer, updates: range) -> None:
    target = torch.randn(N, SIZE, generator=torch.Generator().manual_seed(2))
    for update in updates:
        generator = torch.Generator().manual_seed(update)
        tokens = torch.randint(2, N, (40,), generator=generator)
        loss = (layer(tokens) - target[tokens]).pow(2).sum(-1).mean()
        loss = loss + collect_regularizer(layer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def adam(layer: DPQEmbedding) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("options", [SX, VQ], ids=["sx", "vq"])
def test_rows_are_queries_then_values(options: dict) -> None:
    layer = make(warmup_updates=3, ramp_updates=4, **options)
    optimizer = adam(layer)
    tokens = torch.arange(2, N)
    train(layer, optimizer, range(2))
    assert layer.is_plain
    assert torch.equal(layer(tokens), layer.query[2:])
    assert layer.schedule.tolist() == [3, 3, 7]  # that pass was the last of the warm-up
    layer.eval()
    rows = layer(tokens)
    assert torch.equal(rows, layer.compact()(tokens))
    plain = layer.query.detach()[2:]
    # Four centroids in four dimensions: what is left is well below the variance of the queries.
    assert (rows - plain).pow(2).sum() < 0.7 * (plain - plain.mean(0)).pow(2).sum()


@pytest.mark.parametrize("options", [SX, VQ], ids=["sx", "vq"])
def test_ramp_goes_from_query_to_quantised_row(options: dict) -> None:
    layer = make(warmup_updates=1, ramp_updates=4, **options)
    layer.defer_updates = True
    layer.step()
    tokens = torch.arange(2, N)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        hard = layer.compact()(tokens)
        expected = layer.query[2:] + share * (hard - layer.query[2:])
        torch.testing.assert_close(layer.weight[2:], expected)
        layer.schedule[0] += 1


@pytest.mark.parametrize("options", [SX, VQ], ids=["sx", "vq"])
def test_a_trained_table_takes_the_place_of_the_warmup(options: dict) -> None:
    table = torch.randn(N, SIZE, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    schedule = {"warmup_updates": 3, "ramp_updates": 4}
    layer = DPQEmbedding.from_pretrained(table, 1, K=8, D=4, **schedule, **options)
    assert not layer.is_plain and layer.schedule.tolist() == [3, 3, 7]
    layer.defer_updates = True
    tokens = torch.arange(2, N)
    assert torch.equal(layer(tokens), table[2:])  # the ramp begins at the table itself
    layer.eval()
    quantised = layer(tokens)
    assert torch.equal(quantised, layer.compact()(tokens))
    assert 0 < (quantised - table[2:]).pow(2).sum() < 0.5 * table[2:].pow(2).sum()


@pytest.mark.parametrize("options", [SX, VQ], ids=["sx", "vq"])
@pytest.mark.parametrize("stop", [2, 5])
@pytest.mark.parametrize("library", [True, False])
def test_resumes_bit_for_bit(
    options: dict, stop: int, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library:  # as on a machine without a compiler
        monkeypatch.setattr(native, "softmax_gradients", lambda *parts: None)
    whole = make(warmup_updates=4, ramp_updates=4, **options)
    optimizer = adam(whole)
    train(whole, optimizer, range(stop))
    model, moments = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(whole, optimizer, range(stop, 10))
    other = make(warmup_updates=40, ramp_updates=40, **options)
    other.load_state_dict(model)
    optimizer = adam(other)
    optimizer.load_state_dict(moments)
    train(other, optimizer, range(stop, 10))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_no_codes_during_warmup() -> None:
    layer = make(warmup_updates=5, **SX)
    with pytest.raises(RuntimeError, match="still plain at update 0"):
        layer.compact()


def test_token_has_one_code_in_one_update() -> None:
    layer = make(schedule="warmup", **SX)
    layer.defer_updates = True
    layer(torch.arange(2, N))
    layer.step()
    few, many = torch.arange(2, 8), torch.arange(2, N)
    table = layer.weight
    assert torch.equal(layer(few), table[2:8])
    assert torch.equal(layer(many), table[2:])


def settled(method: str, tied: bool = False, max_update: int = 0, **given: object) -> dict:
    return make_options(method, given).resolved(TableUse(200, tied, max_update)).keywords()


def test_what_is_left_open_takes_the_methods_value() -> None:
    vq = settled("vq", tied=True, max_update=800)
    assert (vq["commitment"], vq["ema_decay"], vq["regularizer_weight"]) == (0.5, 0.99, None)
    assert (vq["schedule"], vq["warmup_updates"], vq["ramp_updates"]) == ("warmup", 200, 400)
    paper = settled("vq", max_update=800, schedule="paper")
    assert (paper["commitment"], paper["ema_decay"], paper["warmup_updates"]) == (0, None, None)
    assert paper["regularizer_weight"] == 1 / 200  # the mean error of a dimension
    sx = settled("sx", max_update=800)
    assert (sx["tau"], sx["warmup_updates"], sx["ramp_updates"]) == (0.05, 100, 400)
    assert settled("sx", schedule="paper")["tau"] == 1.0
    assert settled("sx")["schedule"] == "paper"  # no length, no share of it
    assert settled("sx", max_update=7)["schedule"] == "paper"  # too short for a warm-up
    given = settled("sx", warmup_updates=5)
    assert (given["schedule"], given["warmup_updates"], given["ramp_updates"]) == ("warmup", 5, 0)


def test_each_schedule_refuses_what_only_the_other_has() -> None:
    with pytest.raises(
        DPQConfigError, match="warmup_updates=5 has no effect with schedule='paper'"
    ):
        make(warmup_updates=5, schedule="paper", **SX)
    with pytest.raises(
        DPQConfigError, match=r"ema_decay=0.9 has no effect with schedule='paper'; us"
    ):
        make(method="vq", ema_decay=0.9)  # which is the schedule without a warm-up
    with pytest.raises(
        DPQConfigError, match=r"regularizer_weight=2 has no .* use schedule='paper'"
    ):
        make(method="vq", warmup_updates=3, regularizer_weight=2)
    with pytest.raises(
        DPQConfigError, match=r"warmup_updates=0: must be 1 or more; .* called paper"
    ):
        make(warmup_updates=0)


def test_all_parameters_have_a_gradient_while_plain() -> None:
    """DDP stops at a parameter without one."""
    layer = make(warmup_updates=5, **SX)
    layer(torch.arange(2, N)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)
    assert not layer.values.grad.any() and layer.query.grad[2:].unique().tolist() == [1.0]


def planted_error(optimizer: type, start: float | None = None, **options: object) -> float:
    """What is left of rows that repeat 4 patterns in each of 2 groups; mean over three seeds."""
    errors = []
    for seed in range(3):
        torch.manual_seed(seed)
        layer = DPQEmbedding(64, 8, K=8, D=2, **options)
        if start is not None:
            with torch.no_grad():
                layer.query.normal_(0, start)
                layer.keys.normal_(0, start)
            layer.reset_statistics()
        patterns, planted = torch.randn(2, 4, 4), torch.randint(4, (64, 2))
        target = torch.cat([patterns[j][planted[:, j]] for j in range(2)], 1)
        rate = 0.5 if optimizer is torch.optim.SGD else 0.02
        steps = optimizer([p for p in layer.parameters() if p.requires_grad], lr=rate)
        for _ in range(300):
            loss = (layer(torch.arange(64)) - target).pow(2).sum(-1).mean()
            steps.zero_grad()
            (loss + collect_regularizer(layer)).backward()
            steps.step()
        with torch.no_grad():
            rows = layer.eval()(torch.arange(64))
        errors.append(float((rows - target).pow(2).sum() / target.pow(2).sum()))
    return sum(errors) / 3


@pytest.mark.parametrize("method", ["sx", "vq"])
@pytest.mark.parametrize("schedule", [{}, {"warmup_updates": 40, "ramp_updates": 150}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_a_planted_code_is_learned(method: str, schedule: dict, optimizer: type) -> None:
    """By the paper's schedule, and better after a warm-up."""
    error = planted_error(optimizer, method=method, **schedule)
    assert error < (0.01 if schedule else 0.12)


def test_a_large_start_of_queries_and_keys_hardly_learns() -> None:
    """From N(0, 1) the softmax is hard, and codes stay where they are."""
    assert planted_error(torch.optim.SGD, start=1.0, method="sx") > 0.1


@pytest.mark.parametrize("library", [True, False], ids=["native", "torch"])
def test_rows_of_sx_may_be_changed_in_place(library: bool, monkeypatch) -> None:
    """As convolutional models do when they add positions."""
    if not library:
        monkeypatch.setattr(native, "softmax_gradients", lambda *args: None)
    layer = make(warmup_updates=1, ramp_updates=1, **SX)
    train(layer, adam(layer), range(3))
    rows = layer(torch.arange(2, N))
    rows += 1
    rows.pow(2).sum().backward()
    assert bool(layer.query.grad.any()) and bool(layer.values.grad.any())


@pytest.mark.parametrize("options", [SX, VQ], ids=["sx", "vq"])
def test_a_batch_without_words(options: dict, monkeypatch) -> None:
    monkeypatch.setattr(native, "softmax_gradients", lambda *args: None)
    layer = make(warmup_updates=1, ramp_updates=1, **options)
    train(layer, adam(layer), range(3))
    layer.zero_grad()
    layer(torch.full((2, 3), 1)).sum().backward()  # padding only
    assert not layer.query.grad.any()


@pytest.mark.parametrize("options", [SX, VQ], ids=["sx", "vq"])
def test_a_frozen_table_stays_as_it_is(options: dict) -> None:
    layer = make(warmup_updates=2, ramp_updates=2, **options)
    train(layer, adam(layer), range(6))
    layer.requires_grad_(False)
    before = layer.compact()(torch.arange(N))
    for _ in range(20):
        layer(torch.arange(2, 30))
    assert torch.equal(layer.compact()(torch.arange(N)), before)


def test_a_frozen_table_gets_its_codes() -> None:
    layer = make(warmup_updates=2, ramp_updates=2, **VQ)
    layer.requires_grad_(False)
    for _ in range(3):
        layer(torch.arange(2, N))
    assert not layer.is_plain and layer.codes().any()


@pytest.mark.parametrize("options", [SX, VQ], ids=["sx", "vq"])
def test_seed_and_progress_reach_k_means_before_a_ramp(options: dict) -> None:
    table = torch.randn(N, SIZE, generator=torch.Generator().manual_seed(3))
    rounds: list[int] = []
    sizes = {"K": 16, "D": 2, "warmup_updates": 2, "ramp_updates": 2, **options}
    first = DPQEmbedding.from_pretrained(table, seed=0, progress=rounds.append, **sizes)
    other = DPQEmbedding.from_pretrained(table, seed=5, **sizes)
    assert rounds and not torch.equal(first.values, other.values)


@pytest.mark.parametrize("options", [SX, VQ], ids=["sx", "vq"])
def test_layers_without_numbers_and_without_versions(options: dict) -> None:
    assert DPQEmbedding(
        N, SIZE, K=4, D=2, device="meta", schedule="warmup", **options
    ).query.is_meta
    with torch.inference_mode():
        layer = make(schedule="warmup", **options).eval()
        assert torch.equal(layer.weight[2:], layer(torch.arange(2, N)))


def test_keys_and_values_of_sx_follow_the_queries_along_the_ramp() -> None:
    """Rows are mostly plain then, and queries move on: stale keys would give them poor codes."""
    layer = make(warmup_updates=2, ramp_updates=400, **SX)
    optimizer = torch.optim.Adam([layer.query], lr=0.02)  # keys and values stay, if left alone
    train(layer, optimizer, range(390))
    assert torch.equal(layer.keys, layer.values)
    rows, query = layer.compact()(torch.arange(2, N)), layer.query.detach()[2:]
    left = (rows - query).pow(2).sum() / (query - query.mean(0)).pow(2).sum()
    assert left < 0.85  # 0.59 is what k-means of these queries leaves; stale keys leave 1.01
    train(layer, optimizer, range(390, 405))
    values, keys = layer.values.detach().clone(), layer.keys.detach().clone()
    train(layer, optimizer, range(405, 410))  # past the ramp, values are the optimiser's alone
    assert torch.equal(layer.values, values) and not torch.equal(layer.keys, keys)


def test_a_new_seed_on_the_ramp_stays() -> None:
    layer = make(warmup_updates=1, ramp_updates=100, reseed_after=2, **SX)
    layer.defer_updates = True
    layer.step()
    with torch.no_grad():
        layer.keys[:, 0] = layer.values[:, 0] = 100.0  # far from all queries
        layer.ema_sum[:, 0] = 100.0
    for _ in range(5):
        layer(torch.arange(2, N))
        layer.step()
    assert float(layer.keys.abs().max()) < 1
    assert bool((layer.codes()[2:] == 0).any(0).all())


def test_temperature_of_sx_has_the_unit_of_the_table() -> None:
    """A table of another scale has the same gradient, up to that scale."""
    gradients = []
    for scale in (1.0, 64.0):
        layer = make(warmup_updates=2, ramp_updates=2, **SX)
        with torch.no_grad():
            layer.query.mul_(scale / layer.query.std())
        layer.defer_updates = True
        for _ in range(5):
            layer.step()
        layer(torch.arange(2, N)).sum(0).pow(2).sum().backward()
        gradients.append(layer.query.grad / scale)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)
