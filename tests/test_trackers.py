"""What a table follows: rows that are not finite, passes without gradients, workers without tokens,
replicas, and how often the host waits for the device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fairseq_dpq import DPQEmbedding, collect_regularizer, kept
from fairseq_dpq.fairseq_plugin import resume
from fairseq_dpq.fairseq_plugin.configs import write_record
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.methods import METHODS, make_options
from fairseq_dpq.training import codes, distances, kmeans, trackers
from helpers.layers import METHODS as CASES
from helpers.layers import make
from helpers.toy_checkpoints import load

ALL = [{"method": method, "schedule": schedule} for method, schedule in CASES]
ids = [f"{case['method']}-{case['schedule']}" for case in ALL]


@pytest.mark.parametrize("bad", [float("nan"), 3e38])
@pytest.mark.parametrize("options", ALL, ids=ids)
def test_a_row_that_is_not_finite_leaves_no_trace(options: dict, bad: float) -> None:
    layer = make(**options)
    layer(torch.arange(2, 30))
    before = layer.codes()[31:]
    with torch.no_grad():
        layer.query[30] = bad
    layer(torch.arange(2, 50))
    assert layer.trackers.skipped() > 0 and layer.trackers.skipped() == 0  # told once
    assert all(bool(torch.isfinite(t).all()) for t in layer.buffers())
    for name in ("keys", "values"):
        assert bool(torch.isfinite(getattr(layer, name, layer.values)).all())
    layer(torch.arange(31, 50))  # and learning goes on
    assert all(bool(torch.isfinite(t).all()) for t in layer.buffers())
    assert before.shape == layer.codes()[31:].shape


@pytest.mark.parametrize("options", ALL, ids=ids)
def test_a_pass_without_gradients_is_no_update(options: dict) -> None:
    warm = {"warmup_updates": 3, "ramp_updates": 3} if options["schedule"] == "warmup" else {}
    layer = make(reseed_after=2, **options, **warm)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.no_grad():  # Monte-Carlo dropout
        for _ in range(5):
            layer(torch.arange(2, 50))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert not layer.regularizers.waiting


@pytest.mark.parametrize("options", ALL, ids=ids)
def test_replicas_of_data_parallel_have_the_same_codes(options: dict) -> None:
    """A replica has tensors where the layer has parameters, as torch's `replicate` sets them."""
    layer = make(**options).eval()
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer._parameters.items():
        setattr(replica, name, parameter.detach().clone())
    tokens = torch.arange(50)
    assert torch.equal(replica(tokens), layer(tokens))
    assert torch.equal(replica.codes(), layer.codes())


def test_a_kept_table_follows_what_is_written_past_autograd() -> None:
    layer = make(schedule="warmup").eval()
    with torch.no_grad():
        old = layer.weight.clone()
        layer.query.data.add_(torch.randn_like(layer.query))  # an average of models does that
        rows = layer(torch.arange(50))
        assert torch.equal(layer.weight, rows) and not torch.equal(layer.weight, old)
        layer.values.data.mul_(2)
        assert torch.equal(layer.weight, 2 * rows)
        layer.query.data.copy_(layer.query.data.flip(0))  # the same numbers, other rows
        assert torch.equal(layer.weight, layer(torch.arange(50)))
        assert not torch.equal(layer.weight, 2 * rows)


@pytest.mark.parametrize("method", METHODS)
def test_hints_against_collapse_are_options_of_the_method(method: str) -> None:
    for schedule in ("warmup", "paper") if method in ("sx", "vq") else (None,):
        given = {} if schedule is None else {"schedule": schedule}
        own = make_options(method, {**given, **({"rank": 2} if method == "low_rank" else {})})
        for name, value in own.method.collapse_hints(own):
            assert getattr(own, name) != value
            make_options(method, {**given, name: value}).validate(24)


# Host and device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reseed", [0, 50])
@pytest.mark.parametrize("options", ALL, ids=ids)
def test_the_host_waits_for_the_device_at_most_once_in_an_update(
    options: dict, reseed: int
) -> None:
    """Where a number is read from a tensor, a GPU has to finish first: `aten::item`."""
    warm = {"warmup_updates": 2, "ramp_updates": 6} if options["schedule"] == "warmup" else {}
    layer = make(reseed_after=reseed, **options, **warm)
    layer.defer_updates = True
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], 0.1)

    def update() -> None:
        loss = layer(torch.arange(2, 50)).pow(2).mean() + collect_regularizer(layer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        layer.step()

    for _ in range(3):  # past the k-means
        update()
    updates = 8  # the ramp and what follows it
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(updates):
            update()
    waits = {e.key: e.count for e in found.key_averages()}
    assert waits.get("aten::_local_scalar_dense", 0) <= (updates if reseed else 0), waits
    assert sum(waits.values()) > 100


class NoFloat64(TorchDispatchMode):
    """Fails where a tensor is float64, which Apple's GPUs do not have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            assert not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float64, func
        return out


@pytest.mark.skipif(torch.__version__ < "2", reason="modes of torch 1 are made in another way")
@pytest.mark.parametrize("options", ALL, ids=ids)
def test_a_device_without_float64(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distances.wide_dtype(torch.device("mps")) is torch.float32
    for module in (distances, trackers, kmeans, codes, kept):
        monkeypatch.setattr(module, "wide_dtype", lambda device: torch.float32)
    warm = {"warmup_updates": 1, "ramp_updates": 2} if options["schedule"] == "warmup" else {}
    monkeypatch.setattr("fairseq_dpq.native.library.load", lambda: None)
    layer = DPQEmbedding(50, 24, 1, K=8, D=4, **options, **warm)
    with NoFloat64():
        for _ in range(4):
            (layer(torch.arange(50)).sum() + collect_regularizer(layer)).backward()
        layer.eval()(torch.arange(50))
        assert len(layer.weight.detach()) == 50
        layer.code_usage()


# Workers ------------------------------------------------------------------------------------------


def run_worker(worker: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=worker, world_size=2)
    layer = make(schedule="warmup", method="vq", reseed_after=2, K=40)
    layer.defer_updates = True
    idle = []
    for update in range(4):
        # The first worker sees nothing but padding while codes come of age.
        tokens = torch.arange(2, 9) if worker or update == 3 else torch.ones(3, dtype=torch.long)
        layer(tokens)
        layer.step()
        idle.append(layer.idle.clone())
    own = {"restore_file": "checkpoint_last.pt", "save_dir": f"{folder}/{worker}"}
    found = resume.saved(own.get)
    torch.save((idle, found.tables), f"{folder}/{worker}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def workers() -> list:
    with tempfile.TemporaryDirectory() as folder:
        table = Table(9, 8, 1, make_options("sx", {"K": 4, "D": 2, "schedule": "paper"}).keywords())
        cfg: dict = {}
        write_record(cfg, TablesRecord({"encoder.embed_tokens": table}))
        for worker in range(2):
            Path(folder, str(worker)).mkdir()
        torch.save({"cfg": {"model": cfg}}, Path(folder, "0", "checkpoint_last.pt"))
        mp.start_processes(run_worker, (folder,), nprocs=2, start_method="fork")
        return [load(Path(folder) / f"{w}.pt") for w in range(2)]


def test_codes_wait_for_a_first_worker_with_tokens(workers: list) -> None:
    (first, _), (second, _) = workers
    for one, other in zip(first, second):
        assert torch.equal(one, other)
    unused = first[0] > 0
    assert bool(unused.any())
    for update in range(3):  # nothing to seed from: they go on waiting
        assert first[update][unused].unique().tolist() == [update + 1.0]
    assert not first[3][unused & (first[2] >= 2)].any()


def test_a_worker_that_does_not_see_the_file_has_the_first_ones_record(workers: list) -> None:
    assert workers[1][1] and workers[0][1] == workers[1][1]
