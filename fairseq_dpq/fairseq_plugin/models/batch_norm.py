"""Batch normalisation whose running statistics are the same with any number of workers.
nn.BatchNorm1d keeps those of one worker, and its last micro-batch counts most."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class BatchNorm(nn.Module):
    """Normalises (documents, size) by the batch in training, by running statistics in evaluation.

    `step()`, after each update, lets the running statistics follow the micro-batches of all
    workers since the last call. A batch of one document is allowed: it normalises to zero.
    """

    running_mean: Tensor
    running_var: Tensor
    updates: Tensor

    def __init__(self, size: int, eps: float = 1e-3, momentum: float = 0.99) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))
        # A float, because weight averaging (EMA, averaged checkpoints) takes no integers.
        self.register_buffer("updates", torch.zeros(()))
        self._sums: Tensor | None = None  # (2, size + 1): sums of x and of x^2, and their count

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        if self.training:
            mean = h.mean(0)
            var = h.var(0, unbiased=False)
            self._collect(h.shape[0], mean.detach().double(), var.detach().double())
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight.float() * torch.rsqrt(var + self.eps)
        return ((h - mean) * scale + self.bias.float()).to(x.dtype)

    def _collect(self, count: int, mean: Tensor, var: Tensor) -> None:
        sums = torch.stack([mean, var + mean * mean]) * count
        sums = torch.cat([sums, sums.new_full((2, 1), count)], dim=1)
        self._sums = sums if self._sums is None else self._sums + sums

    @torch.no_grad()
    def step(self) -> None:
        """Let the running statistics follow; all workers call it alike."""
        sums = self._sums
        if sums is None:
            sums = self.running_mean.new_zeros(2, self.running_mean.numel() + 1).double()
        self._sums = None
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        count = sums[0, -1]
        if not count:
            return
        mean, square = sums[:, :-1] / count
        var = (square - mean * mean).clamp_min(0)
        self.updates += 1
        # A plain average at first, so that the initial 0 and 1 leave no trace.
        rate = max(1 / float(self.updates), 1 - self.momentum)
        self.running_mean += (rate * (mean - self.running_mean)).float()
        self.running_var += (rate * (var - self.running_var)).float()

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> BatchNorm:
        super()._apply(fn, *args, **kwargs)
        # Running statistics stay float32: they move in steps too small for half precision.
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.float()
        self._sums = None
        return self


def step_all(model: nn.Module) -> None:
    """Let the statistics of every such layer of a model follow an update."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.step()
