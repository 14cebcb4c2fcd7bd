"""SM3 against the published update rule worked by hand, its memory, and its life inside fairseq:
half precision, resume, shards."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_dpq.fairseq_plugin.optim import SM3, FairseqSM3
from helpers import fsq


def _step(optimizer: SM3, p: torch.nn.Parameter, grad: list) -> None:
    p.grad = torch.tensor(grad, dtype=p.dtype)
    optimizer.step()


def test_matrix_two_steps_by_hand() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = SM3([p], lr=0.5, momentum=0.9)
    # Step 1: accumulators are 0, so nu = g^2 and g / sqrt(nu) is the sign.
    _step(optimizer, p, [[1.0, 2.0], [3.0, 0.0]])
    m1 = 0.1 * torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(p.data, -0.5 * m1)
    state = optimizer.state[p]
    assert state["accumulator_0"].flatten().tolist() == [4.0, 9.0]  # row maxima of [[1,4],[9,0]]
    assert state["accumulator_1"].flatten().tolist() == [9.0, 4.0]  # column maxima
    # Step 2: min(row, column) = [[4, 4], [9, 4]], plus g^2 = [[5, 5], [9, 8]].
    _step(optimizer, p, [[1.0, -1.0], [0.0, 2.0]])
    u2 = torch.tensor([[1 / math.sqrt(5), -1 / math.sqrt(5)], [0.0, 2 / math.sqrt(8)]])
    m2 = 0.9 * m1 + 0.1 * u2
    torch.testing.assert_close(p.data, -0.5 * (m1 + m2))
    assert state["accumulator_0"].flatten().tolist() == [5.0, 9.0]
    assert state["accumulator_1"].flatten().tolist() == [9.0, 8.0]


def test_three_axes_by_hand() -> None:
    # One non-zero entry at (0, 1, 0); the next step sees it only where all three slices hold it.
    p = torch.nn.Parameter(torch.zeros(2, 2, 2))
    optimizer = SM3([p], lr=1.0, momentum=0.0)
    first = torch.zeros(2, 2, 2)
    first[0, 1, 0] = 3.0
    _step(optimizer, p, first.tolist())
    state = optimizer.state[p]
    assert [state[f"accumulator_{i}"].flatten().tolist() for i in range(3)] == [
        [9.0, 0.0],
        [0.0, 9.0],
        [9.0, 0.0],
    ]
    before = p.data.clone()
    _step(optimizer, p, torch.full((2, 2, 2), 4.0).tolist())
    expected = torch.ones(2, 2, 2)  # 4 / sqrt(0 + 16)
    expected[0, 1, 0] = 4.0 / 5.0  # 4 / sqrt(9 + 16)
    torch.testing.assert_close(before - p.data, expected)
    assert "momentum_buffer" not in state


def test_vectors_and_scalars_are_adagrad() -> None:
    for shape in ((3,), ()):
        p = torch.nn.Parameter(torch.ones(shape))
        optimizer = SM3([p], lr=0.1, momentum=0.0)
        for g in (3.0, 4.0):
            _step(optimizer, p, torch.full(shape, g).tolist())
        torch.testing.assert_close(p.data, torch.full(shape, 1 - 0.1 * (1 + 4 / 5)))


def test_zero_gradient_moves_nothing_and_weight_decay_joins_the_gradient() -> None:
    p = torch.nn.Parameter(torch.tensor([[2.0, 2.0]]))
    _step(SM3([p], lr=1.0), p, [[0.0, 0.0]])
    assert p.data.tolist() == [[2.0, 2.0]]
    q = torch.nn.Parameter(torch.tensor([[2.0, -2.0]]))
    optimizer = SM3([q], lr=1.0, momentum=0.0, weight_decay=0.5)
    _step(optimizer, q, [[3.0, 0.0]])
    assert optimizer.state[q]["accumulator_1"].tolist() == [[16.0, 1.0]]  # (3 + 1)^2, (0 - 1)^2
    torch.testing.assert_close(q.data, torch.tensor([[1.0, -1.0]]))


def test_memory_is_sublinear() -> None:
    p = torch.nn.Parameter(torch.zeros(1000, 50))
    optimizer = SM3([p], momentum=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert sum(t.numel() for t in optimizer.state[p].values()) == 1000 + 50


def test_half_precision_goes_through_float32() -> None:
    # 1 + 4 * 2^-13 in steps of 2^-13: a float16 accumulator of 1 + 2^-12 would stay at 1.
    p = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    optimizer = SM3([p], lr=0.25, momentum=0.9)
    _step(optimizer, p, [[1.0, 1.0], [1.0, 1.0]])
    _step(optimizer, p, [[0.015625] * 2] * 2)
    state = optimizer.state[p]
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert state["accumulator_0"].flatten().tolist() == [1.0 + 2.0**-12] * 2
    assert p.dtype == torch.float16


def test_refuses_bad_settings() -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"momentum 1\.0.*0 <= momentum < 1"):
        SM3([p], momentum=1.0)
    with pytest.raises(ValueError, match=r"lr -1\.0.*needs lr >= 0"):
        SM3([p], lr=-1.0)


def _fairseq_sm3(params: list, lr: float = 0.1) -> FairseqSM3:
    return FairseqSM3(OmegaConf.create({"lr": [lr], "momentum": 0.9, "weight_decay": 0.0}), params)


def test_shards_equal_one_optimizer() -> None:
    """fairseq's `--zero-sharding os` builds `type(optimizer)(params, **optimizer_config)` for each
    worker's share of the parameters."""
    torch.manual_seed(1)
    whole = [torch.nn.Parameter(torch.randn(s)) for s in ((4, 3), (5,), (2, 3, 2))]
    split = [torch.nn.Parameter(p.data.clone()) for p in whole]
    one = _fairseq_sm3(whole)
    shards = [type(one.optimizer)(part, **one.optimizer_config) for part in (split[:1], split[1:])]
    for _ in range(3):
        for p, q in zip(whole, split):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        one.step()
        for shard in shards:
            shard.step()
    for p, q in zip(whole, split):
        assert torch.equal(p, q)
    assert one.supports_memory_efficient_fp16
    assert not one.supports_flat_params


NO_HALF = pytest.mark.skipif(
    not fsq.torch_at_least(2, 1), reason="this torch has no float16 arithmetic on CPU"
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="fp32"),
        pytest.param(["--memory-efficient-fp16"], id="fp16", marks=NO_HALF),
    ],
)
def test_resume_in_fairseq_is_bit_exact(tmp_path: Path, flags: list[str]) -> None:
    data = fsq.make_lm_corpus(tmp_path, n_lines=60, n_valid=8, n_test=8)
    common = [
        str(data), "--user-dir", fsq.USER_DIR, "--task", "language_modeling", "--arch",
        "transformer_lm", "--decoder-embed-dim", "16", "--decoder-input-dim", "16",
        "--decoder-output-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-layers", "1",
        "--decoder-attention-heads", "2", "--tokens-per-sample", "16", "--batch-size", "4",
        "--cpu", "--optimizer", "sm3", "--lr", "0.1", "--lr-scheduler", "quadratic_warmup",
        "--warmup-updates", "4", "--max-epoch", "1", "--num-workers", "0", "--log-format",
        "simple", "--disable-validation", "--data-buffer-size", "0", "--fp16-init-scale", "4",
        *flags,
    ]  # fmt: skip

    def train(name: str, updates: int) -> dict:
        save = tmp_path / name
        fsq.main("train", [*common, "--save-dir", str(save), "--max-update", str(updates)])
        return torch.load(save / "checkpoint_last.pt")

    whole = train("whole", 6)
    train("parts", 3)
    parts = train("parts", 6)
    for name, tensor in fsq.learned(whole["model"]).items():
        assert torch.equal(tensor, parts["model"][name]), name
    states = [c["last_optimizer_state"]["state"] for c in (whole, parts)]
    for i, entries in states[0].items():
        for name, tensor in entries.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, states[1][i][name]), (i, name)
