"""compress and compact: which tables are taken, that outputs stay, sizes, ties, refusals."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from fairseq_dpq import (
    CodesLinear,
    CompactEmbedding,
    DPQEmbedding,
    collect_regularizer,
    compact,
    compress,
)
from fairseq_dpq.model import find_tables
from helpers.any_model import BAG, PAD, PAIRS, ROWS, SIZE, SMALL, some_ids, toy

OTHERS = SMALL * SIZE + BAG * SIZE + ROWS  # position, bag, the bias of the output


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_kind_of_table() -> None:
    model, ids = toy(), some_ids()
    before = model(ids)
    assert parameters(model) == ROWS * SIZE + PAIRS * SIZE + OTHERS
    report = compress(model, K=8, min_rows=100)
    assert parameters(model) == OTHERS
    assert type(model.token) is CompactEmbedding and type(model.position) is nn.Embedding
    assert model.first is model.second is model.same
    assert isinstance(model.output, CodesLinear) and model.output.table is model.token
    # The tables take 8 values in each pair of numbers, so codes lose nothing but rounding.
    assert torch.allclose(model(ids), before, atol=1e-3)
    assert torch.equal(model.token(torch.tensor([PAD])), torch.zeros(1, SIZE))
    assert torch.equal(model.output(torch.ones(SIZE))[PAD], model.output.bias[PAD])

    token, pairs = report.tables
    # A row: 8 codes of 3 bits. Values: 8 groups of 8 pairs of floats. A checksum of 32 bytes.
    assert token.after == ROWS * 3 + 8 * 8 * 2 * 4
    assert token.before == ROWS * SIZE * 4 and token.ratio == token.before / token.after
    assert (token.tied, token.aliases) == (("output",), ())
    assert (pairs.tied, pairs.aliases) == ((), ("second", "same"))
    assert token.error is not None and token.error < 1e-9
    assert report.model_before == 4 * (ROWS * SIZE + PAIRS * SIZE + OTHERS)
    assert report.model_after == token.after + pairs.after + 4 * OTHERS
    assert report.share == pytest.approx((ROWS + PAIRS) * SIZE * 4 / report.model_before)
    assert list(report.left) == ["position", "bag"]


def test_report_as_text() -> None:
    report = compress(toy(), K=8, min_rows=100)
    assert str(report).splitlines() == [
        "table       rows x size  form                     before   after  ratio  error",
        "token          600 x 16  product_codes K=8, D=8   38,400   2,312   16.6   0.0%",
        "first          500 x 16  product_codes K=8, D=8   32,000   2,012   15.9   0.0%",
        "embeddings                                        70,400   4,324   16.3",
        "model                                            120,800  54,724    2.2",
        "embeddings were 58% of the model",
        "token: tied to output",
        "first: also second, also same",
        "token: error 0.0% of what varies between rows, 0.00% by use",
        "token: int8 would have ratio 2.7, error 0.00%, 0.00% by use",
        "first: error 0.0% of what varies between rows, 0.00% by use",
        "first: int8 would have ratio 2.7, error 0.00%, 0.00% by use",
        "position stays as it is: 50 rows, fewer than min_rows=100",
        "bag stays as it is: EmbeddingBag sums the rows of a bag; only nn.Embedding can be "
        "compressed",
    ]


def test_error_is_the_share_of_what_varies() -> None:
    model = nn.Sequential(nn.Embedding(300, 12))
    with torch.no_grad():
        model[0].weight.add_(5)  # what all rows have in common does not hide the error
    table = model[0].weight.detach().double()
    report = compress(model, K=4, D=6, which="0")
    error, apart = model[0].dense().double() - table, table - table.mean(0)
    lost = error.pow(2).sum() / apart.pow(2).sum()
    assert report.tables[0].error == pytest.approx(float(lost), rel=1e-6)
    assert 0.05 < float(lost) < 0.5
    use = 1 / (torch.arange(300).double() + 30)
    center = (use @ table) / use.sum()
    used = (use @ error.pow(2).sum(1)) / (use @ (table - center).pow(2).sum(1))
    assert report.tables[0].lost.used == pytest.approx(float(used), rel=1e-6)


@pytest.mark.parametrize("method", ["vq", "sx"])
def test_training_form_then_compact(method: str) -> None:
    model, ids = toy(), some_ids()
    before = model(ids)
    report = compress(model, K=8, method=method, min_rows=100, trainable=True)
    assert isinstance(model.token, DPQEmbedding) and not model.token.training
    assert model.first is model.second is model.same
    if method == "vq":  # starts exactly at the codes of k-means
        assert torch.allclose(model(ids), before, atol=1e-3)
    model.train()
    (model(ids).pow(2).mean() + collect_regularizer(model)).backward()
    for table in (model.token, model.first):
        assert table.query.grad is not None and float(table.query.grad.abs().sum()) > 0
    assert model.output.bias.grad is not None
    with torch.no_grad():
        model.token.query.add_(0.1 * torch.randn_like(model.token.query))
    model.eval()
    trained = model(ids)
    done = compact(model)
    assert [t.after for t in done.tables] == [t.after for t in report.tables]
    assert (done.model_before, done.model_after) == (report.model_before, report.model_after)
    assert done.tables[0].tied == ("output",) and done.tables[0].error is None
    assert isinstance(model.token, CompactEmbedding) and model.output.table is model.token
    assert parameters(model) == OTHERS
    assert torch.allclose(model(ids), trained, atol=1e-4)
    with pytest.raises(ValueError, match="no table in training form"):
        compact(model)


def test_sparse_and_frozen_tables_in_training() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Embedding(50, 8))
    model[1].weight.requires_grad_(False)
    compress(model, K=4, which="*", trainable=True)
    model[0](torch.tensor([3, 4])).sum().backward()
    assert model[0].query.grad.is_sparse
    assert not any(p.requires_grad for p in model[1].parameters())


def test_a_padding_row_that_is_not_zero_is_kept() -> None:
    model = nn.Sequential(nn.Embedding(40, 4, padding_idx=2))
    with torch.no_grad():
        model[0].weight[2] = 9.0
    compress(model, K=16, which="0")
    assert torch.allclose(model[0](torch.tensor([2])), torch.full((1, 4), 9.0))


def test_tied_by_memory_alone() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(60, 8), "b": nn.Linear(8, 60, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.detach())
    assert compress(model, K=8, which="a").tables[0].tied == ("b",)
    h = torch.randn(2, 8)
    assert torch.allclose(model["b"](h), h @ model["a"].dense().t(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays(dtype: torch.dtype) -> None:
    model = toy().to(dtype)
    report = compress(model, K=8, min_rows=100)
    assert model.token(some_ids()).dtype == dtype
    assert model.output(torch.ones(1, SIZE, dtype=dtype)).dtype == dtype
    assert report.tables[0].before == ROWS * SIZE * 2


def test_other_forms() -> None:
    model, ids = toy(), some_ids()
    before = model(ids)
    report = compress(model, method="scalar", bits=8, which=["token", "first"])
    assert report.tables[0].description == "scalar 8 bits by row"
    assert report.tables[0].after == ROWS * (SIZE + 8)
    assert float((model(ids) - before).abs().max()) < 0.02 * float(before.abs().max())
    assert isinstance(model.output, CodesLinear) and model.output.table is model.token
    full = toy()
    report = compress(full, method="low_rank", rank=SIZE, which="token")
    assert report.tables[0].error is not None and report.tables[0].error < 1e-9


def test_which() -> None:
    def chosen(which: Any) -> list[str]:
        return [table.path for table in compress(toy(), K=4, which=which).tables]

    assert chosen("same") == ["first"]  # any of its paths
    assert chosen(["to*", "position"]) == ["token", "position"]
    assert chosen(lambda path, module: module.weight.shape[0] == SMALL) == ["position"]


def test_default_D_is_half_of_the_size() -> None:
    model = nn.Sequential(*[nn.Embedding(50, size) for size in (8, 15, 7)])
    compress(model, K=4, which="*")
    assert [table.D for table in model] == [4, 5, 7]


def test_seed_and_progress() -> None:
    seen: dict[str, list[int]] = {}

    def bar(what: str, steps: int) -> Any:
        seen[what] = [steps, 0]

        def update(done: int) -> None:
            seen[what][1] += done

        return update

    model = nn.Sequential(nn.Embedding(300, 8))
    tables = [copy.deepcopy(model) for _ in range(3)]
    for model, seed in zip(tables, (0, 0, 1)):
        compress(model, K=8, which="0", seed=seed, progress=bar)
    same, again, other = (model[0].values for model in tables)
    assert torch.equal(same, again) and not torch.equal(same, other)
    assert (
        list(seen) == ["compress 0"] and 1 <= seen["compress 0"][1] <= seen["compress 0"][0] == 25
    )


def test_hooks_are_kept() -> None:
    model, calls = toy(), []
    model.token.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    model.output.register_forward_pre_hook(lambda module, args: calls.append(type(module)))
    compress(model, K=4, min_rows=100)
    model(some_ids())
    assert calls == [CompactEmbedding, CodesLinear]


class Scaled(nn.Embedding):
    """As models of Hugging Face have it."""

    embed_scale = 3.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale


class Shifted(Scaled):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1


def test_a_scale_of_the_rows_is_kept() -> None:
    table = Scaled(60, 8)
    other = nn.Embedding(60, 8)
    other.weight = table.weight
    model = nn.ModuleDict({"a": table, "b": other, "c": nn.Linear(8, 60, bias=False)})
    model["c"].weight = table.weight
    model["same"] = table
    for settings in ({}, {"trainable": True}):
        copied, ids = copy.deepcopy(model), torch.arange(60)
        report = compress(copied, K=4, which="a", **settings)
        assert report.tables[0].aliases == ("b", "same") and report.tables[0].tied == ("c",)
        if settings:
            compact(copied)
        plain = copied["b"].dense()
        assert torch.equal(copied["a"](ids), plain * 3) and copied["a"] is copied["same"]
        assert copied["a"].table is copied["b"] is copied["c"].table
        assert torch.equal(copied["a"].weight, plain)


class Holder(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.matrix = weight


def _shared_with_a_stranger() -> nn.Module:
    table = nn.Embedding(50, 8)
    return nn.Sequential(table, Holder(table.weight))


@pytest.mark.parametrize(
    "model,why",
    [
        (nn.Sequential(nn.EmbeddingBag(50, 8)), "0 cannot be compressed: EmbeddingBag sums"),
        (nn.Sequential(Shifted(50, 8)), "0 cannot be compressed: Shifted has a forward of its own"),
        (nn.Sequential(nn.Embedding(50, 8, max_norm=1.0)), "max_norm=1.0 changes rows"),
        (nn.Sequential(nn.Embedding(50, 8)).double(), "torch.float64: only float32"),
        (_shared_with_a_stranger(), "its weight is also 1.matrix of a Holder"),
        (nn.Embedding(50, 8), "it is the model itself"),
        (nn.Sequential(nn.Linear(8, 8)), "no embedding table"),
    ],
)
def test_what_cannot_be_compressed(model: nn.Module, why: str) -> None:
    found = {id(m): type(m) for m in model.modules()}
    with pytest.raises(ValueError, match=why):
        compress(model, K=4, which="*")
    with pytest.raises(ValueError, match="nothing to compress"):
        compress(model, K=4, min_rows=10)
    assert {id(m): type(m) for m in model.modules()} == found


@pytest.mark.parametrize(
    "options,why",
    [
        ({"D": 5}, "token: D=5 does not divide the embedding size 16; try 4 or 8"),
        ({"K": 1}, "token: K=1: must be from 2"),
        ({"method": "pq"}, "method='pq': choose one of .*vq.*scalar"),
        ({"method": "scalar", "trainable": True}, "method='scalar': choose one of"),
        ({"method": "scalar", "D": 4}, "D=4 has no effect with method='scalar', which takes bits"),
        (
            {"K": 4, "bits": 4},
            "bits=4 has no effect with method='sx', which takes K, D, share_subspaces",
        ),
        ({"bits": 4}, "bits=4 has no effect with method='tiers', which takes target_ratio, tiers"),
        ({"ratio": 4}, "ratio=4 has no effect with method='tiers', which takes target_ratio"),
        ({"method": "scalar", "K": 4}, "K=4 has no effect with method='scalar', which takes bits"),
        ({"target_ratio": 1.0}, "target_ratio=1.0: must be above 1"),
        ({"K": 8, "target_ratio": 9}, "target_ratio is for tiers .*; leave K out"),
        (
            {"trainable": True, "counts": torch.ones(ROWS)},
            "counts is for tiers .*; leave trainable out",
        ),
        ({"tiers": [(600, 4, 4)], "target_ratio": 9}, "give tiers or target_ratio, not both"),
        (
            {"tiers": [(600, 4, 4)], "which": "first"},
            "first: tiers: they have 600 rows, the table 500",
        ),
        ({"tiers": [(600, 4, 5)], "which": "token"}, "D divides 16"),
        ({"tiers": [(600, 4)], "which": "token"}, "expected rows, K and D, three numbers"),
        ({"calibrate": []}, "calibrate has no batches"),
        ({"counts": torch.ones(7)}, "counts: the tables have different numbers of rows"),
        ({"counts": {"token": torch.ones(7)}}, "counts of token: expected 600, found"),
        ({"counts": {"tokens": torch.ones(7)}}, "counts: the model has no table tokens; it has"),
        ({"counts": {"token": -torch.ones(ROWS)}}, "counts of token: must not be negative"),
        (
            {"bits": 4, "trainable": True},
            "token: bits=4: there is no such option; sx takes sparse, K, D",
        ),
        ({"k": 32}, r"k=32 has no effect with method='tiers', .*; did you mean K\?"),
        ({"D": 8, "k": 32}, r"k=32 has no effect .* share_subspaces; did you mean K\?"),
        ({"k": 32, "trainable": True}, r"k=32: there is no such option; did you mean K\?"),
        ({"method": "low_rank"}, "method='low_rank' needs a rank: rank=N makes a table of d"),
        ({"method": "low_rank", "trainable": True}, "method='low_rank' needs a rank"),
        ({"D": 5, "trainable": True}, "token: D=5 does not divide embedding_dim=16"),
        (
            {"which": "tokens"},
            "no embedding table called tokens; it has token, first, second, same",
        ),
        ({"which": lambda path, module: False}, "that `which` chooses"),
        ({"min_rows": 10_000}, "nothing to compress: token: 600 rows, fewer than min_rows=10000"),
    ],
)
def test_refused_settings_leave_the_model_alone(options: dict[str, Any], why: str) -> None:
    model = toy()
    with pytest.raises(ValueError, match=why):
        compress(model, **{"min_rows": 100, **options})
    assert type(model.token) is nn.Embedding and type(model.output) is nn.Linear


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("which", [None, "token"])
def test_compressed_twice(trainable: bool, which: str | None) -> None:
    model = toy()
    compress(model, K=4, min_rows=100, trainable=trainable)
    why = "; compressed before: token, first. Load the full model to compress it in another way"
    with pytest.raises(ValueError, match=why):
        compress(model, K=8, which=which, min_rows=100)
    compress(model, K=8, which="position")  # the next one


def test_gradient_scaling_is_refused_only_in_training() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, scale_grad_by_freq=True))
    with pytest.raises(ValueError, match="0: scale_grad_by_freq=True has no training form"):
        compress(model, K=4, which="0", trainable=True)
    compress(model, K=4, which="0")
    assert isinstance(model[0], CompactEmbedding)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(number: float) -> None:
    model = toy()
    with torch.no_grad():
        model.first.weight[7, 3] = number
    with pytest.raises(ValueError, match="first: the table holds NaN or infinite numbers"):
        compress(model, K=4, min_rows=100)
    assert type(model.token) is nn.Embedding
    empty = nn.Sequential(nn.Embedding(50, 8, device="meta"))
    with pytest.raises(ValueError, match="0: the table is on the meta device"):
        compress(empty, which="0")


def test_find_tables_names_each_table_once() -> None:
    assert [(f.path, f.paths, list(f.tied)) for f in find_tables(toy())] == [
        ("token", ["token"], ["output"]),
        ("first", ["first", "second", "same"], []),
        ("position", ["position"], []),
        ("bag", ["bag"], []),
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"K": 2.5}, "K=2.5: must be a whole number"),
        ({"D": "8"}, "D='8': must be a whole number"),
        ({"target_ratio": "13"}, "target_ratio='13': must be a number"),
        ({"target_ratio": 0}, "target_ratio=0: must be above 1"),
        ({"target_ratio": 1e6}, "leave no room for codes; try a lower ratio"),
        ({"targetratio": 3}, "did you mean target_ratio?"),
        ({"K": 16, "target_ratio": 5}, "target_ratio is for tiers"),
        ({"calibrate": ["text"]}, "calibrate: the model does not take batch 1"),
        ({"calibrate": [torch.rand(2, 3)]}, "calibrate: the model does not take batch 1"),
    ],
)
def test_wrong_arguments_are_one_line_and_change_nothing(settings: Any, said: str) -> None:
    model = nn.Sequential(nn.Embedding(6000, 32))
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        compress(model, **settings)
    assert "\n" not in str(caught.value)
    assert type(model[0]) is nn.Embedding and torch.equal(model[0].weight, before)


def test_what_is_not_a_model_is_said() -> None:
    with pytest.raises(ValueError, match=r"expected an nn\.Module, found 'gpt2'"):
        compress("gpt2")
    with pytest.raises(ValueError, match="the module: it is the model itself"):
        compress(nn.Embedding(6000, 32))
