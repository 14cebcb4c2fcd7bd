"""Quadratic learning-rate warm-up, the schedule of the paper's WMT19 Transformer.
lr_t = lr * min(1, (t / warmup)^2) for update t = 1, 2, ..."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

from dataclasses import dataclass, field
from typing import Any, List

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II


@dataclass
class QuadraticWarmupConfig(FairseqDataclass):
    warmup_updates: int = field(
        default=10000,
        metadata={
            "help": "number of updates in which the learning rate grows quadratically to --lr"
        },
    )
    lr: List[float] = field(default=II("optimization.lr"))


@register_lr_scheduler("quadratic_warmup", dataclass=QuadraticWarmupConfig)
class QuadraticWarmupSchedule(FairseqLRScheduler):
    """Grows as the square of the update number, then stays at `--lr`."""

    def __init__(self, cfg: QuadraticWarmupConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if len(cfg.lr) != 1:
            raise ValueError(f"--lr {list(cfg.lr)}: quadratic_warmup takes one learning rate")
        if cfg.warmup_updates < 0:
            raise ValueError(f"--warmup-updates {cfg.warmup_updates} is negative; 0 means none")
        self.step_update(0)

    def lr_at(self, update: int) -> float:
        """Learning rate of the update-th update, counted from 1."""
        if update >= self.cfg.warmup_updates:
            return float(self.cfg.lr[0])
        return float(self.cfg.lr[0] * (update / self.cfg.warmup_updates) ** 2)

    def step_update(self, num_updates: int) -> Any:
        """fairseq passes the number of updates done; the rate set here is that of the next one."""
        self.optimizer.set_lr(self.lr_at(num_updates + 1))
        return self.optimizer.get_lr()
