"""What a stored form has lost of a table, and what the usual forms would lose."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_dpq.any_model.calibration import Knowledge
from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.choosing_tiers import id_order
from fairseq_dpq.forms.scalar import ScalarEmbedding

_ROWS = 1 << 13  # rows held in double precision at once
_SAMPLE = 4096  # rows by which other forms are judged
_TOLERABLE = 0.1  # squared error of what varies, by use
_TOLERABLE_KL = 0.05  # nats: about 5 % more perplexity


class Lost(NamedTuple):
    """What a stored form has lost of a table."""

    error: float  # squared, as a share of what varies between rows
    used: float  # the same, with rows counted by their use
    divergence: float | None  # KL of the output distribution, calibrated
    logits: tuple[float, float] | None  # mean squared error of logits, and their variance
    few: int  # types seen by the calibration, if they are few

    @property
    def high(self) -> float:
        """How many times more is lost than a model bears; 0 if it should bear it."""
        lost = self.used / _TOLERABLE
        if self.divergence is not None:
            lost = self.divergence / _TOLERABLE_KL
        return lost if lost > 1 else 0.0

    def __str__(self) -> str:
        text = f"error {self.error:.1%} of what varies between rows, {self.used:.2%} by use"
        if self.logits is not None:
            text += f", of logits {self.logits[0]:.3f} where their variance is {self.logits[1]:.1f}"
        if self.divergence is not None:
            more = math.expm1(self.divergence)
            text += (
                f"; the output layer alone, on the text of the calibration: +{more:.1%} perplexity"
            )
        return text


class Peer(NamedTuple):
    """The same table as others store it."""

    name: str
    ratio: float
    error: float
    used: float

    def __str__(self) -> str:
        lost = f"error {self.error:.2%}, {self.used:.2%} by use"
        return f"{self.name} would have ratio {self.ratio:.1f}, {lost}"


@torch.no_grad()
def judge(full: Tensor, form: Form, known: Knowledge) -> Lost:
    """What a form has lost of a full table (n, d)."""
    n = len(full)
    real = torch.ones(n, dtype=torch.float64, device=full.device)
    if form.padding_idx is not None:
        real[form.padding_idx] = 0
    use = real * (id_order(n).to(real) if known.weight is None else known.weight.double())
    centers = [_center(full, weight) for weight in (real, use)]
    lost, varied = [0.0, 0.0], [0.0, 0.0]
    logits = [0.0, 0.0]
    share, spread = known.share, known.spread
    for start in range(0, n, _ROWS):
        part = slice(start, min(start + _ROWS, n))
        rows = full[part].double()
        error = rows - form(torch.arange(part.start, part.stop, device=full.device)).double()
        for i, weight in enumerate((real, use)):
            lost[i] += float((error.pow(2).sum(1) * weight[part]).sum())
            varied[i] += float(((rows - centers[i]).pow(2).sum(1) * weight[part]).sum())
        if share is not None and spread is not None:
            for i, x in enumerate((error, rows - centers[1])):
                logits[i] += float((((x @ spread) * x).sum(1) * share[part]).sum())
    errors = [a / max(b, 1e-300) for a, b in zip(lost, varied)]
    of_logits = None if share is None else (logits[0], logits[1])
    return Lost(errors[0], errors[1], known.divergence, of_logits, known.few)


def _center(full: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(full.shape[1], dtype=torch.float64, device=full.device)
    for rows, w in zip(full.split(_ROWS), weight.split(_ROWS)):
        total += w @ rows.double()
    return total / weight.sum().clamp_min(1e-300)


@torch.no_grad()
def compare(full: Tensor, known: Knowledge) -> tuple[Peer, ...]:
    """int8, and int4 in groups of 32, of a sample of the rows."""
    n, d = full.shape
    pick = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:_SAMPLE].to(full.device)
    rows = full[pick].float()
    use = (id_order(n).to(full.device) if known.weight is None else known.weight)[pick]
    apart = [rows - rows.mean(0), rows - (rows * (use / use.sum()).unsqueeze(1)).sum(0)]
    out = []
    for name, bits, group in (("int8", 8, 0), ("int4 in groups of 32", 4, 32)):
        if group and d % group:
            continue
        form = ScalarEmbedding.from_table(rows, bits=bits, group=group)
        error = (rows - form.dense()).pow(2).sum(1)
        plain = float(error.sum() / apart[0].pow(2).sum().clamp_min(1e-30))
        used = float((error * use).sum() / (apart[1].pow(2).sum(1) * use).sum().clamp_min(1e-30))
        out.append(Peer(name, form.compression_ratio(), plain, used))
    return tuple(out)
