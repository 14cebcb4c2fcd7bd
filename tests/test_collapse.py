"""Help against codes that nobody uses: re-seeding, EMA centroids; and several workers,
which must hold the same numbers as one."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import helpers.layers
from fairseq_dpq import DPQEmbedding, collect_regularizer


def make(**options: object) -> DPQEmbedding:
    return helpers.layers.make(60, 12, 1, **{"K": 8, "D": 3, **options})


# Re-seeding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sx", "vq"])
@pytest.mark.parametrize("shared", [False, True])
def test_dead_codes_move_to_queries_after_their_time(method: str, shared: bool) -> None:
    layer = make(method=method, schedule="warmup", reseed_after=3, share_subspaces=shared)
    G = 1 if shared else 3
    with torch.no_grad():
        layer.codebook().keys[:, 5] = 1e3  # nobody is near
    tokens = torch.arange(2, 60)
    q = layer.query.detach()[tokens].view(58, 3, 4)
    for update in range(3):
        assert torch.equal(layer.idle[:, 5], torch.full((G,), float(update)))
        assert bool((layer.codebook().keys[:, 5] == 1e3).all())
        values = layer.values.detach().clone()
        layer(tokens)
    for g in range(G):
        pool = q.reshape(-1, 4) if shared else q[:, g]
        # the very query of a token that was seen
        assert (layer.codebook().keys[g, 5] == pool).all(-1).any()
        if method == "sx":  # the value of that token's code: its embedding does not jump
            assert (layer.values[g, 5] == values[g]).all(-1).any()
            assert not torch.equal(layer.values[g, 5], values[g, 5])
    assert not layer.idle[:, 5].any()
    layer(tokens)
    assert not layer.idle[:, 5].any()  # in use now


def test_reseeding_revives_codes() -> None:
    def used(reseed_after: int) -> float:
        layer = make(K=32, method="vq", reseed_after=reseed_after, schedule="warmup")
        with torch.no_grad():
            layer.values[:, 4:] = 100.0
        for _ in range(12):
            layer(torch.arange(60))
        return layer.code_usage()["used"].float().mean().item()

    assert used(0) <= 4 and used(2) > 16


# EMA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_ema_equals_numpy(shared: bool) -> None:
    decay = 0.8
    layer = make(method="vq", ema_decay=decay, share_subspaces=shared, schedule="warmup")
    assert not layer.values.requires_grad
    G = 1 if shared else 3
    values = layer.values.detach().double().numpy()
    count, total = np.ones((G, 8)), values.copy()
    q_all = layer.query.detach().double().numpy().reshape(60, 3, 4)
    for seed in range(4):
        tokens = np.random.default_rng(seed).integers(2, 60, 25)
        out = layer(torch.from_numpy(tokens))
        used, sums = np.zeros((G, 8)), np.zeros((G, 8, 4))
        for i, token in enumerate(tokens):
            for j in range(3):
                g = 0 if shared else j
                q = q_all[token, j]
                k = ((values[g] - q) ** 2).sum(-1).argmin()
                np.testing.assert_allclose(
                    out[i, 4 * j : 4 * j + 4].detach().numpy(), values[g, k], rtol=1e-4, atol=1e-5
                )  # the forward pass sees the centroids before they move
                used[g, k] += 1
                sums[g, k] += q
        count = decay * count + (1 - decay) * used
        total = decay * total + (1 - decay) * sums[...]
        values = np.where((used > 0)[..., None], total / count[..., None], values)
        np.testing.assert_allclose(layer.values.numpy(), values, rtol=1e-4, atol=1e-5)
    collect_regularizer(layer)
    out = layer(torch.from_numpy(tokens))
    (out.sum() + collect_regularizer(layer)).backward()
    assert layer.values.grad is None and layer.query.grad.abs().sum() > 0


def test_ema_leaves_only_the_commitment_in_the_loss() -> None:
    layer = make(method="vq", ema_decay=0.9, commitment=0.5, schedule="warmup")
    out = layer(torch.arange(2, 60))
    error = (out.detach() - layer.query.detach()[2:]).pow(2).sum(1).mean()
    torch.testing.assert_close(collect_regularizer(layer).detach(), 0.5 * error)


# Workers ------------------------------------------------------------------------------------------

CONFIGS: list[dict] = [
    {"method": "sx"},
    {"method": "sx", "share_subspaces": True},
    {"method": "vq", "schedule": "warmup"},
    {"method": "vq", "schedule": "warmup", "share_subspaces": True},
    {"method": "sx", "schedule": "warmup", "warmup_updates": 2, "ramp_updates": 2},
    {"method": "vq", "schedule": "warmup", "warmup_updates": 2, "ramp_updates": 2},
    {"method": "sx", "reseed_after": 2, "K": 40},
    {"method": "vq", "schedule": "warmup", "reseed_after": 2, "K": 40},
]
UPDATES = 5


def micro_batch(update: int, worker: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(10 * update + worker)
    if update == 3 and worker == 0:
        return torch.ones(4, dtype=torch.long)  # nothing but padding
    return torch.randint(60, (9 + 6 * worker,), generator=g)  # workers of different sizes


def run_worker(worker: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=worker, world_size=2)
    results = []
    for options in CONFIGS:
        layer = make(**options)
        torch.manual_seed(100 + worker)  # workers draw different random numbers
        history = []
        for update in range(UPDATES):
            layer(micro_batch(update, worker))
            history.append(copy.deepcopy(layer.state_dict()))
        results.append(history)
    torch.save(results, f"{folder}/{worker}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def workers() -> list:
    with tempfile.TemporaryDirectory() as folder:
        # forked, not spawned: the workers have torch loaded and do nothing in parallel
        mp.start_processes(run_worker, (folder,), nprocs=2, start_method="fork")
        return [torch.load(Path(folder) / f"{worker}.pt") for worker in range(2)]


@pytest.mark.parametrize(
    "number", range(len(CONFIGS)), ids=lambda i: "-".join(map(str, CONFIGS[i]))
)
def test_two_workers_hold_the_same_numbers_as_one_process(workers: list, number: int) -> None:
    """Statistics, EMA centroids and starts of two workers equal each other bit for bit, and those
    of one process that takes the same two micro-batches in each update."""
    one, two = workers[0][number], workers[1][number]
    layer = make(**CONFIGS[number])
    layer.defer_updates = True
    random = bool(CONFIGS[number].get("reseed_after"))  # draws: worker 0's are in force
    for update in range(UPDATES):
        for key, value in one[update].items():
            assert torch.equal(value, two[update][key]), (update, key)
        for worker in range(2):
            layer(micro_batch(update, worker))
        layer.step()
        if random and update >= 1:  # the first re-seeding: the draws part here
            assert not torch.equal(one[update]["idle"], one[0]["idle"])
            break
        for key, value in layer.state_dict().items():
            torch.testing.assert_close(value, one[update][key], rtol=1e-5, atol=1e-6)
    start = make(**CONFIGS[number]).state_dict()
    changed = {key for key, value in one[-1].items() if not torch.equal(value, start[key])}
    assert changed >= ({"values"} if "schedule" in CONFIGS[number] else set())
    assert "query" not in changed
