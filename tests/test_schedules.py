"""Learning-rate schedules: quadratic warm-up against its formula, and the constant-then-decay
schedule of the LSTM language models, which fairseq's own `fixed` gives."""

from __future__ import annotations

import pytest
import torch
from fairseq.optim.lr_scheduler.fixed_schedule import FixedLRSchedule
from fairseq.optim.sgd import SGD
from omegaconf import OmegaConf

from fairseq_dpq.fairseq_plugin.optim import QuadraticWarmupSchedule


def _sgd(lr: float) -> SGD:
    cfg = OmegaConf.create({"lr": [lr], "momentum": 0.0, "weight_decay": 0.0})
    return SGD(cfg, [torch.nn.Parameter(torch.zeros(1))])


def test_quadratic_warmup_by_hand() -> None:
    optimizer = _sgd(0.3)
    cfg = OmegaConf.create({"warmup_updates": 4, "lr": [0.3]})
    schedule = QuadraticWarmupSchedule(cfg, optimizer)
    rates = [optimizer.get_lr()]  # what the first update uses
    for done in range(1, 6):
        schedule.step_update(done)
        rates.append(optimizer.get_lr())
    # (1/4)^2, (2/4)^2, (3/4)^2, then constant
    assert rates == pytest.approx([0.01875, 0.075, 0.16875, 0.3, 0.3, 0.3], rel=1e-12)


def test_quadratic_warmup_of_the_paper_and_none() -> None:
    schedule = QuadraticWarmupSchedule(
        OmegaConf.create({"warmup_updates": 10000, "lr": [0.1]}), _sgd(0.1)
    )
    assert schedule.lr_at(1) == pytest.approx(1e-9)
    assert schedule.lr_at(5000) == pytest.approx(0.025)
    assert schedule.lr_at(10000) == schedule.lr_at(250000) == 0.1
    none = QuadraticWarmupSchedule(OmegaConf.create({"warmup_updates": 0, "lr": [0.1]}), _sgd(0.1))
    assert none.lr_at(1) == 0.1


def test_quadratic_warmup_refuses_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"--lr \[0\.1, 0\.2\].*one learning rate"):
        QuadraticWarmupSchedule(
            OmegaConf.create({"warmup_updates": 4, "lr": [0.1, 0.2]}), _sgd(0.1)
        )


@pytest.mark.parametrize(
    ("anneal", "shrink", "expected"),
    [
        (5, 0.5, {1: 1.0, 4: 1.0, 5: 0.5, 6: 0.25, 15: 0.5**11}),  # small
        (7, 0.8, {6: 1.0, 7: 0.8, 35: 0.8**29}),  # medium
        (15, 1 / 1.15, {14: 1.0, 15: 1 / 1.15, 35: 1.15**-21}),  # large
    ],
)
def test_fixed_is_constant_then_a_factor_per_epoch(
    anneal: int, shrink: float, expected: dict[int, float]
) -> None:
    """`--lr-scheduler fixed --force-anneal E --lr-shrink F` holds --lr before epoch E and
    multiplies by F from epoch E on: a schedule of our own is not needed."""
    optimizer = _sgd(1.0)
    cfg = {"force_anneal": anneal, "lr_shrink": shrink, "warmup_updates": 0, "lr": [1.0]}
    schedule = FixedLRSchedule(OmegaConf.create(cfg), optimizer)
    rates = {}
    for epoch in range(1, 36):
        schedule.step_begin_epoch(epoch)
        schedule.step_update(epoch * 100)
        rates[epoch] = optimizer.get_lr()
    for epoch, rate in expected.items():
        assert rates[epoch] == pytest.approx(rate, rel=1e-12)
