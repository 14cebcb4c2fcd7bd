"""What compression did to a model: bytes and loss, table by table, and what the usual forms would
lose."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_dpq.any_model.calibration import Knowledge
from fairseq_dpq.files.memory import identity
from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.choosing_tiers import id_order
from fairseq_dpq.forms.scalar import ScalarEmbedding
from fairseq_dpq.size_report import text_table

_ROWS = 1 << 13  # rows held in double precision at once
_SAMPLE = 4096  # rows by which other forms are judged
_TOLERABLE = 0.1  # squared error of what varies, by use
_TOLERABLE_KL = 0.05  # nats: about 5 % more perplexity
_HOPELESS = 7.0  # nats: a thousand times the perplexity

_HEADER: tuple[str, ...] = ("table", "rows x size", "form", "before", "after", "ratio", "error")


class Lost(NamedTuple):
    """What a stored form has lost of a table."""

    error: float  # squared, as a share of what varies between rows
    used: float  # the same, with rows counted by their use
    divergence: float | None  # KL of the output distribution, calibrated
    few: int  # types seen by the calibration, if they are few

    @property
    def high(self) -> float:
        """How many times more is lost than a model bears; 0 if it should bear it."""
        lost = self.used / _TOLERABLE
        if self.divergence is not None:
            lost = self.divergence / _TOLERABLE_KL
        return 0.0 if lost <= 1 else lost  # which NaN is not

    def __str__(self) -> str:
        text = f"error {self.error:.1%} of what varies between rows, {self.used:.2%} by use"
        if self.divergence is None:
            return text
        small = self.divergence < _HOPELESS
        more = f"+{math.expm1(self.divergence):.1%} perplexity" if small else "no use any more"
        return f"{text}; the output layer alone, on the text of the calibration: {more}"


class Peer(NamedTuple):
    """The same table as others store it."""

    name: str
    ratio: float
    error: float
    used: float

    def __str__(self) -> str:
        lost = f"error {self.error:.2%}, {self.used:.2%} by use"
        return f"{self.name} would have ratio {self.ratio:.1f}, {lost}"


@dataclass(frozen=True)
class TableReport:
    """What became of one table."""

    path: str
    num_embeddings: int
    embedding_dim: int
    description: str
    before: int  # bytes
    after: int  # bytes as saved
    lost: Lost | None = None  # None if not known
    peers: tuple[Peer, ...] = ()
    aliases: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.before / self.after

    @property
    def error(self) -> float | None:
        """Squared error as a share of what varies between rows; None if not known."""
        return None if self.lost is None else self.lost.error

    def warnings(self) -> list[str]:
        """What to say if the model will suffer, or the calibration has seen few of the rows."""
        lines = []
        if self.lost is not None and self.lost.high:
            # An error falls four times with each bit a number.
            bits = 32 * self.after / (4 * self.num_embeddings * self.embedding_dim)
            ratio = 32 / (bits + math.log2(self.lost.high) / 2 + 0.5)
            fix = f"target_ratio={ratio:.1f}" if ratio > 4 else "method='scalar', bits=8"
            lines.append(f"the model will suffer from this loss; try {fix}")
        if self.lost is not None and self.lost.few:
            lines.append(
                f"the calibration has only {self.lost.few} of {self.num_embeddings} types; other "
                "text may lose more, so add text of other kinds"
            )
        return lines


@dataclass(frozen=True)
class Report:
    """What became of a model's tables, and its size before and after. `print(report)` shows all.

    Sizes are those of the saved tensors. With `trainable` they hold once the model is compact.
    """

    tables: tuple[TableReport, ...]
    model_before: int
    left: dict[str, str] = field(default_factory=dict)  # tables that stay as they are, and why
    uncalibrated: bool = False  # the order of ids stood for the use of rows

    @property
    def before(self) -> int:
        """Bytes of the compressed tables before."""
        return sum(table.before for table in self.tables)

    @property
    def after(self) -> int:
        """Bytes of the compressed tables after."""
        return sum(table.after for table in self.tables)

    @property
    def model_after(self) -> int:
        return self.model_before - self.before + self.after

    @property
    def ratio(self) -> float:
        """How many times smaller the tables are."""
        return self.before / self.after

    @property
    def model_ratio(self) -> float:
        """How many times smaller the model is."""
        return self.model_before / self.model_after

    @property
    def share(self) -> float:
        """What share of the model these tables were."""
        return self.before / self.model_before

    def __str__(self) -> str:
        rows = [_HEADER]
        for table in self.tables:
            error = "" if table.error is None else f"{table.error:.1%}"
            size = f"{table.num_embeddings} x {table.embedding_dim}"
            sizes = _sizes(table.before, table.after)
            rows.append((table.path, size, table.description, *sizes, error or "-"))
        rows.append(("embeddings", "", "", *_sizes(self.before, self.after), ""))
        rows.append(("model", "", "", *_sizes(self.model_before, self.model_after), ""))
        lines = text_table(rows, left=(0, 2)).splitlines()
        lines.append(f"embeddings were {self.share:.0%} of the model")
        for table in self.tables:
            also = [f"also {name}" for name in table.aliases]
            also += [f"tied to {name}" for name in table.tied]
            if also:
                lines.append(f"{table.path}: {', '.join(also)}")
        for table in self.tables:
            lost = [] if table.lost is None else [table.lost]
            lines += [f"{table.path}: {x}" for x in (*lost, *table.peers, *table.warnings())]
        if self.uncalibrated:
            lines.append(
                "rows count by the order of ids; calibrate=BATCHES of text like yours loses half "
                "as much at a ratio of 10, or as much at 13 (docs/real-models.md)"
            )
        lines += [f"{path} stays as it is: {why}" for path, why in self.left.items()]
        return "\n".join(lines)


def _sizes(before: int, after: int) -> tuple[str, ...]:
    return f"{before:,}", f"{after:,}", f"{before / after:.1f}"


def model_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that saving a model would write, shared ones once."""
    tensors = [t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]
    return sum({identity(t): t.numel() * t.element_size() for t in tensors}.values())


# What is lost -------------------------------------------------------------------------------------


@torch.no_grad()
def judge(full: Tensor, form: Form, known: Knowledge) -> Lost:
    """What a form has lost of a full table (n, d)."""
    real = torch.ones(len(full), dtype=torch.float64, device=full.device)
    if form.padding_idx is not None:
        real[form.padding_idx] = 0
    error, used = _shares(full, form, real, real * _use(full, known))
    return Lost(error, used, known.divergence, known.few)


@torch.no_grad()
def compare(full: Tensor, known: Knowledge) -> tuple[Peer, ...]:
    """int8, and int4 in groups of 32, of a sample of the rows."""
    n, d = full.shape
    pick = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:_SAMPLE].to(full.device)
    rows, use = full[pick].float(), _use(full, known)[pick]
    out = []
    for name, bits, group in (("int8", 8, 0), ("int4 in groups of 32", 4, 32)):
        if not group or d % group == 0:
            form = ScalarEmbedding.from_table(rows, bits=bits, group=group)
            shares = _shares(rows, form, torch.ones_like(use), use)
            out.append(Peer(name, form.compression_ratio(), *shares))
    return tuple(out)


def _use(full: Tensor, known: Knowledge) -> Tensor:
    """How much each row is used (n,)."""
    weight = known.weights[0]
    use = id_order(len(full)).to(full.device) if weight is None else weight
    return use.double()


def _shares(full: Tensor, form: Form, *weights: Tensor) -> list[float]:
    """Squared error of rows as a share of what varies between them, by some weights (n,)."""
    weight = torch.stack(weights)
    lost = square = total = weight.new_zeros(())
    for start in range(0, len(full), _ROWS):
        part = slice(start, min(start + _ROWS, len(full)))
        rows, own = full[part].double(), weight[:, part]
        error = rows - form(torch.arange(part.start, part.stop, device=full.device)).double()
        lost = lost + own @ error.pow(2).sum(1)
        square, total = square + own @ rows.pow(2).sum(1), total + own @ rows
    varied = square - total.pow(2).sum(1) / weight.sum(1).clamp_min(1e-300)
    return (lost / varied.clamp_min(1e-300)).tolist()
