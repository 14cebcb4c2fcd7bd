"""DPQEmbedding as a drop-in for nn.Embedding: shapes, dtypes, gradients, statistics, the whole
table, copies; and the package without fairseq."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_dpq import CompactEmbedding, DPQEmbedding, code_usage, collect_regularizer, dpq_modules
from helpers.layers import METHODS, make, train
from helpers.toy_checkpoints import load

# As nn.Embedding --------------------------------------------------------------------------------


def test_signature_and_repr() -> None:
    layer = DPQEmbedding(1000, 64, 1, K=32, D=16, share_subspaces=True)
    full = nn.Embedding(1000, 64, 1)
    for name in ("num_embeddings", "embedding_dim", "padding_idx"):
        assert getattr(layer, name) == getattr(full, name)
    assert tuple(layer.weight.shape) == tuple(full.weight.shape)
    # 1000 * 16 * 5 + 32 * 32 * 4 bits
    assert repr(layer) == (
        "DPQEmbedding(1000, 64, padding_idx=1, K=32, D=16, share_subspaces, method=sx, CR=24.4)"
    )
    assert round(1000 * 64 * 32 / (80000 + 4096), 1) == 24.4
    assert "method=vq, CR=" in repr(DPQEmbedding(10, 4, D=2, method="vq"))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 4), (0,), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_shape_of_indices(shape: tuple, dtype: torch.dtype) -> None:
    layer = make()
    tokens = torch.randint(50, shape).to(dtype)
    wanted = nn.Embedding(50, 24)(tokens).shape
    compact = layer.compact()
    for form in (layer, layer.eval(), compact, layer.compact(packed=True)):
        assert form(tokens).shape == wanted
    assert torch.equal(layer(tokens), compact(tokens.long()))


@pytest.mark.parametrize("tokens", [[50], [-1], [0, 3, 1000], [-51], [1, 1, 50]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_indices_out_of_range(tokens: list, dtype: torch.dtype, padding_idx: int | None) -> None:
    layer = make(padding_idx=padding_idx)
    small = make(D=24, share_subspaces=True, padding_idx=padding_idx)  # rows of one element
    forms = [nn.Embedding(50, 24), layer, layer.compact(), layer.compact(packed=True)]
    forms += [copy.deepcopy(layer).eval(), small.compact(), small.compact(dtype=torch.float16)]
    for form in forms:
        with pytest.raises(IndexError):
            form(torch.tensor(tokens, dtype=dtype))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method,schedule", METHODS)
def test_padding_is_zero_and_takes_no_gradient(method: str, schedule: str, shared: bool) -> None:
    layer = make(method=method, schedule=schedule, share_subspaces=shared, padding_idx=-49)
    assert layer.padding_idx == 1
    tokens = torch.tensor([[1, 4, 1], [7, 1, 1]])
    out = layer(tokens)
    assert not out[tokens == 1].any() and out[tokens != 1].abs().min() > 0
    (out.pow(2).sum() + out.sum() + collect_regularizer(layer)).backward()
    touched = layer.query.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [4, 7]
    # nothing but padding: zeros, and zero gradients rather than none
    layer.zero_grad()
    layer(torch.tensor([1, 1])).sum().backward()
    assert not layer.query.grad.any()
    assert not layer.eval()(torch.tensor([1, 1])).any()
    with torch.no_grad():
        assert torch.signbit(layer.weight[1]).sum() == 0 == layer.weight[1].abs().sum()


def test_output_may_be_changed_in_place() -> None:
    """Models add positions to their embeddings or scale them in place."""
    for method in ("sx", "vq"):
        layer = make(method=method, padding_idx=None)
        out = layer(torch.arange(6))
        out *= 2
        out += 1
        out.sum().backward()
        assert layer.query.grad[:6].abs().min() > 0


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_sparse_gradients(method: str) -> None:
    dense, sparse = make(method=method), make(method=method, sparse=True)
    tokens = torch.tensor([[4, 4, 1], [9, 30, 1]])
    for layer in (dense, sparse):
        out = layer(tokens)
        ((out * torch.linspace(-1, 1, 24)).sum() + collect_regularizer(layer)).backward()
    assert sparse.query.grad.is_sparse
    assert sorted(set(sparse.query.grad.coalesce().indices().flatten().tolist())) == [4, 9, 30]
    torch.testing.assert_close(sparse.query.grad.to_dense(), dense.query.grad)
    before = sparse.query.detach().clone()
    torch.optim.SparseAdam([sparse.query], lr=0.01).step()
    moved = (sparse.query.detach() - before).abs()
    assert moved.sum(1).nonzero().flatten().tolist() == [4, 9, 30]
    # Adam's first step is lr in the direction of the sign
    torch.testing.assert_close(moved[[4, 9, 30]].max(), torch.tensor(0.01), rtol=1e-3, atol=0)


# Half precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method,schedule", METHODS)
def test_half_precision_is_the_cast_of_float32(
    method: str, schedule: str, dtype: torch.dtype
) -> None:
    half = train(make(method=method, schedule=schedule)).to(dtype)
    statistics = dict(half.named_buffers())
    assert half.query.dtype == dtype and statistics
    assert all(buffer.dtype == torch.float32 for buffer in statistics.values())
    full = copy.deepcopy(half).float()  # the same rounded numbers
    tokens = torch.randint(50, (4, 9))
    with torch.no_grad():
        assert torch.equal(half.eval()(tokens), full.eval()(tokens).to(dtype))
        assert torch.equal(half.codes(), full.codes())
        assert torch.equal(half.compact()(tokens), half(tokens))
        assert torch.equal(half.compact().dense(), half.weight)
    up = torch.randn(4, 9, 24).to(dtype)
    outs = []
    for layer in (half.train(), full.train()):
        layer.zero_grad()
        out = layer(tokens)
        outs.append(out)
        ((out * up).sum() + collect_regularizer(layer)).backward()
    assert outs[0].dtype == dtype and torch.equal(outs[0], outs[1].to(dtype))
    for name, buffer in half.named_buffers():  # statistics are float32 in both
        assert torch.equal(buffer, dict(full.named_buffers())[name]), name
    tolerance = {"rtol": 0.02, "atol": 0.02}  # the sum over repeated tokens is dtype's own
    torch.testing.assert_close(half.query.grad, full.query.grad.to(dtype), **tolerance)
    if half.values.requires_grad:
        torch.testing.assert_close(half.values.grad, full.values.grad.to(dtype), **tolerance)


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_autocast_changes_nothing(method: str) -> None:
    plain, cast = make(method=method, K=32), make(method=method, K=32)
    tokens = torch.arange(50)
    out = plain(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = cast(tokens)
        cast_table = cast.weight
    assert torch.equal(out, same) and torch.equal(plain.norm_mean, cast.norm_mean)
    assert torch.equal(plain.weight, cast_table)


# Statistics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_running_statistics_are_an_average_and_then_follow(shared: bool) -> None:
    layer = make(padding_idx=None, share_subspaces=shared)
    q, keys = layer.query.detach().view(50, 4, 6), layer.keys.detach()
    axis = (0, 1) if shared else 0
    mean = var = torch.zeros(())
    for update in range(1, 111):
        tokens = torch.randint(50, (20,), generator=torch.Generator().manual_seed(update))
        layer(tokens)
        resp = torch.einsum("tjx,jkx->tjk", q[tokens], keys.expand(4, 8, 6)).double()
        rate = max(1 / update, 0.01)
        mean = mean + rate * (resp.mean(axis) - mean)
        var = var + rate * (resp.var(axis, unbiased=False) - var)
    torch.testing.assert_close(layer.norm_mean.double().view_as(mean), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.norm_var.double().view_as(var), var, rtol=1e-4, atol=1e-5)
    frozen = layer.norm_mean.clone()
    layer.eval()(torch.arange(50))
    assert torch.equal(layer.norm_mean, frozen)  # evaluation leaves them


def test_deferred_updates_weigh_micro_batches_by_their_tokens() -> None:
    layer = make(padding_idx=1)
    layer.defer_updates = True
    q, keys = layer.query.detach().view(50, 4, 6), layer.keys.detach()
    first, second = torch.tensor([3, 4, 5, 1, 1]), torch.tensor([6, 7, 8, 9, 10, 11, 1])
    layer(first)
    layer(second)
    assert float(layer.norm_updates) == 0
    assert layer.step() is False  # no parameter was set
    both = torch.cat([first, second])
    resp = torch.einsum("tjx,jkx->tjk", q[both[both != 1]], keys).double()
    assert float(layer.norm_updates) == 1
    torch.testing.assert_close(layer.norm_mean.double(), resp.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        layer.norm_var.double(), resp.var(0, unbiased=False), rtol=1e-4, atol=1e-5
    )
    assert layer.step() is False and float(layer.norm_updates) == 1  # nothing new


def test_ignored_batches_leave_no_trace() -> None:
    layer = make(method="vq", schedule="warmup", ema_decay=0.9, reseed_after=2)
    before = copy.deepcopy(layer.state_dict())
    layer.ignore_batch = layer.defer_updates = True
    out = layer(torch.arange(20))
    assert out.abs().sum() > 0
    layer.step()
    for key, value in layer.state_dict().items():
        # The update itself counts: codes wait on, averages fade, centroids stay where they are.
        moved = before[key] + 1 if key == "idle" else before[key]
        moved = moved * 0.9 if key.startswith("ema_") else moved
        torch.testing.assert_close(value, moved, rtol=1e-6, atol=0, msg=key)


# The regulariser --------------------------------------------------------------------------------


def test_regularizer_of_several_passes_is_one_mean() -> None:
    layer = make(method="vq", padding_idx=None, commitment=0.5, regularizer_weight=2.0)
    first, second = torch.arange(5), torch.arange(5, 50)
    rows = torch.cat([layer(first), layer(second)]).detach()
    assert layer.regularizers.waiting
    regularizer = collect_regularizer(layer)
    error = (rows - layer.query.detach()).pow(2).sum(1).mean()
    torch.testing.assert_close(regularizer, 2.5 * error)
    assert layer.regularizers.pop() is None and not layer.regularizers.waiting


def test_regularizers_of_a_model_are_summed_each_once() -> None:
    a, b = make(method="vq"), make(method="vq", n=20)
    model = nn.ModuleDict({"a": a, "again": a, "b": b, "sx": make()})
    assert list(dpq_modules(model)) == [a, b, model["sx"]]
    tokens = torch.arange(20)
    parts = []
    for layer in (a, b):
        layer(tokens)
        parts.append(collect_regularizer(layer))
        layer(tokens)
    torch.testing.assert_close(collect_regularizer(model), parts[0] + parts[1])
    assert collect_regularizer(model).item() == 0  # taken once
    assert collect_regularizer(nn.Linear(2, 2)).item() == 0


def test_no_regularizer_in_evaluation_or_without_gradient() -> None:
    layer = make(method="vq")
    with torch.no_grad():
        layer(torch.arange(5))
    layer.eval()(torch.arange(5))
    assert layer.regularizers.pop() is None


def test_a_forgotten_regularizer_warns_once_and_holds_no_memory() -> None:
    layer = make(method="vq")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            layer(torch.arange(5))
    texts = [str(w.message) for w in caught if "collect_regularizer(model)" in str(w.message)]
    assert len(texts) == 1 and len(layer.regularizers.waiting) <= 64


# The whole table --------------------------------------------------------------------------------


@pytest.mark.parametrize("method,schedule", METHODS)
def test_weight_gradient_is_that_of_a_lookup_of_all(method: str, schedule: str) -> None:
    layer = train(make(method=method, schedule=schedule))
    layer.regularizers.pop()
    up = torch.randn(50, 24)
    grads = []
    for table in (layer.eval()(torch.arange(50)), layer.train().weight):
        layer.zero_grad()
        (table * up).sum().backward()
        grads.append([None if p.grad is None else p.grad.clone() for p in layer.parameters()])
    for one, other in zip(*grads):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    assert grads[0][0].abs().sum() > 0


def test_weight_recomputes_what_it_computed() -> None:
    """Statistics that move between the table and its backward pass must not change its gradient."""
    layer, other = make(K=16), make(K=16)
    up = torch.randn(50, 24)
    for move, l in ((False, layer), (True, other)):
        l(torch.arange(10))
        table = l.weight
        if move:
            l(torch.arange(10, 50))
        l.zero_grad()
        (table * up).sum().backward()
    torch.testing.assert_close(layer.query.grad, other.query.grad, rtol=0, atol=0)


def test_weight_is_kept_until_something_changes() -> None:
    layer = make().eval()
    with torch.no_grad():
        table = layer.weight
        assert layer.weight is table
        layer.values.mul_(2)
        assert torch.equal(layer.weight, 2 * table)
        changed = layer.weight
        layer.norm_mean.add_(torch.randn_like(layer.norm_mean))
        assert layer.weight is not changed
        state = make(K=8).state_dict()
        layer.load_state_dict(state)
        assert torch.equal(layer.weight, table)
    assert layer.weight.requires_grad


def test_tied_output_layer_trains() -> None:
    """An output layer that multiplies by `weight` can learn the identity."""
    layer = make(n=30, padding_idx=None, K=16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    tokens = torch.arange(30)
    losses = []
    for _ in range(80):
        logits = layer(tokens) @ layer.weight.t()
        loss = nn.functional.cross_entropy(logits, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.25 * losses[0]


def test_frozen_codes_are_those_of_evaluation() -> None:
    layer = train(make()).eval()
    tokens = torch.randint(50, (4, 5))
    wanted = layer(tokens)
    layer.freeze()
    assert torch.equal(layer(tokens), wanted)
    with torch.no_grad():
        layer.query.normal_()
    layer.train()
    layer.eval()
    assert not torch.equal(layer(tokens), wanted)  # train() thaws
    layer.freeze()
    layer.load_state_dict(make().state_dict())  # and so do other parameters
    assert torch.equal(layer(tokens), make().eval()(tokens))


def test_code_usage_by_hand() -> None:
    codes = torch.tensor([[0, 2], [0, 1], [3, 1], [1, 1], [0, 0]], dtype=torch.uint8)
    usage = code_usage(codes, 4)
    assert usage["used"].tolist() == [3, 3]
    # (3, 1, 0, 1) / 5 and (1, 3, 1, 0) / 5
    torch.testing.assert_close(usage["entropy"], torch.full((2,), 1.3709505945))
    without = code_usage(codes, 4, padding_idx=4)  # (2, 1, 0, 1) / 4 and (0, 3, 1, 0) / 4
    assert without["used"].tolist() == [3, 2]
    torch.testing.assert_close(without["entropy"], torch.tensor([1.5, 0.8112781245]))
    layer = make()
    mine = layer.code_usage()
    assert mine["used"].tolist() == code_usage(layer.codes(), 8, 1)["used"].tolist()


def test_codes_report_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairseq_dpq.layer._ROWS", 16)
    seen: list[int] = []
    layer = make()
    codes = layer.codes(seen.append)
    assert seen == [16, 16, 16, 2]
    monkeypatch.undo()
    assert torch.equal(codes, layer.codes()) and codes.dtype == torch.uint8
    assert make(K=300).codes().dtype == torch.int16


# Copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_copies_in_the_middle_of_training(method: str) -> None:
    layer = train(make(method=method, reseed_after=3))
    layer.defer_updates = True
    layer(torch.arange(9))  # a graph, pending statistics and a regulariser are alive
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        load(buffer),
    ]
    tokens = torch.randint(50, (3, 7))
    layer.regularizers.pop()
    for tracker in layer.trackers:
        tracker.clear()
    wanted = layer(tokens)
    for other in copies:
        assert other.regularizers.pop() is None
        assert torch.equal(other(tokens), wanted)
        other.query.data.add_(1)
    assert torch.equal(layer.state_dict()["query"], layer.query)  # copies share no memory


@pytest.mark.parametrize(
    "options", [{}, {"method": "vq", "schedule": "warmup"}, {"schedule": "warmup"}]
)
def test_training_goes_on_exactly_after_a_state_dict(options: dict) -> None:
    one = train(make(**options), steps=3)
    other = make(**options)
    other.load_state_dict(one.state_dict())
    for layer in (one, other):
        train(layer, steps=3)
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


# Without fairseq --------------------------------------------------------------------------------


def test_imports_without_fairseq() -> None:
    code = """
        import sys

        class Without:  # a finder that finds all but these
            def __init__(self, finder):
                self.finder = finder

            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("fairseq", "fairseq_cli", "hydra", "omegaconf"):
                    return None
                return self.finder.find_spec(name, path, target)

        sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
        from fairseq_dpq import DPQEmbedding
        import torch
        layer = DPQEmbedding(100, 32, K=8, D=4)
        layer(torch.arange(7)).sum().backward()
        print(tuple(layer.compact()(torch.arange(7)).shape))
        assert not [m for m in sys.modules if m.split(".")[0] in ("fairseq", "hydra", "omegaconf")]
    """
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(7, 32)\n"


def test_compact_is_what_torchscript_sees() -> None:
    layer = train(make()).eval()
    model = nn.Sequential(layer, nn.Linear(24, 3))
    tokens = torch.randint(50, (2, 4))
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(tokens), model(tokens))
    assert isinstance(layer.compact(), CompactEmbedding)
    assert "query" not in dict(scripted.named_parameters())


@pytest.mark.parametrize("options", [{"method": "sx"}, {"method": "vq"}], ids=["sx", "vq"])
def test_one_table_for_lookups_and_output_is_what_each_would_give(options: dict) -> None:
    """Same loss, gradients and statistics, over a ramp and two micro-batches for each update."""
    layers = []
    for serves in (False, True):
        torch.manual_seed(0)
        layer = DPQEmbedding(30, 8, 1, K=4, D=4, warmup_updates=2, ramp_updates=6, **options)
        layer.serves_output, layer.defer_updates = serves, True
        optimizer = torch.optim.SGD(layer.parameters(), 0.5)
        losses = []
        for _ in range(6):
            for _ in range(2):
                source, target = torch.randint(30, (5,)), torch.randint(30, (7,))
                logits = (layer(source).mean(0) + layer(target)) @ layer.weight.t()
                loss = F.cross_entropy(logits, target) + collect_regularizer(layer)
                loss.backward()
                losses.append(loss.item())
            layer.step()
            optimizer.step()
            optimizer.zero_grad()
        layers.append((losses, layer))
    (losses, apart), (shared_losses, together) = layers
    assert losses == pytest.approx(shared_losses, rel=1e-5)
    assert losses[0] != losses[-1]
    for (name, one), other in zip(apart.state_dict().items(), together.state_dict().values()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)


def test_a_kept_table_does_not_outlive_what_it_came_from() -> None:
    layer = DPQEmbedding(30, 8, K=4, D=4, schedule="warmup")
    layer.serves_output = layer.defer_updates = True
    first = layer.weight
    assert layer.weight is first
    with torch.no_grad():
        layer.values.add_(1)
    changed = layer.weight
    assert changed is not first and torch.allclose(changed, first + 1)
    changed.sum().backward()
    assert layer.weight is not changed, "its graph is gone"
    layer.eval()
    assert not layer.train().weight.is_leaf and copy.deepcopy(layer).weight is not layer.weight


@pytest.mark.parametrize("passes", [3, 65])
def test_a_regularizer_that_nobody_collects_is_named_once(passes: int) -> None:
    """After many passes at once, in a short training when the table is made compact."""
    layer = make(method="vq", schedule="paper")
    tokens = torch.arange(8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(passes):
            layer(tokens)
        assert len(seen) == (passes > 64)
        layer.compact(), layer.compact()
    assert [str(w.message).split(":")[0] for w in seen] == [
        f"the regulariser of a DPQEmbedding was not collected for {passes} forward passes"
    ]
    layer = make(method="vq", schedule="paper")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(passes):
            (layer(tokens).sum() + collect_regularizer(layer)).backward()
        layer(tokens)
        layer.compact()
