"""What compression did to a model: bytes table by table, and of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Hashable

from torch import Tensor, nn

from fairseq_dpq.any_model.judging import Lost, Peer
from fairseq_dpq.files.memory import identity
from fairseq_dpq.forms.base import Form
from fairseq_dpq.size_report import text_table

_HEADER: tuple[str, ...] = ("table", "rows x size", "form", "before", "after", "ratio", "error")


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

    def few(self) -> str:
        """What to say if the calibration has seen few of the rows; empty if not."""
        if self.lost is None or not self.lost.few:
            return ""
        return (
            f"{self.path}: the calibration has only {self.lost.few} of {self.num_embeddings} "
            "types; other text may lose more, so add text of other kinds"
        )

    def warning(self) -> str:
        """What to say if the model will suffer; empty if it should not."""
        if self.lost is None or not self.lost.high:
            return ""
        # An error falls four times with each bit a number.
        bits = 32 * self.after / (4 * self.num_embeddings * self.embedding_dim)
        more = bits + math.log2(self.lost.high) / 2 + 0.5
        fix = f"target_ratio={32 / more:.1f}" if 32 / more > 4 else "method='scalar', bits=8"
        return f"{self.path}: the model will suffer from this loss; try {fix}"


@dataclass(frozen=True)
class Report:
    """What became of a model's tables, and its size before and after. `print(report)` shows all.

    Sizes are those of the saved tensors. With `trainable` they hold once the model is compact.
    """

    tables: tuple[TableReport, ...]
    model_before: int
    model_after: int
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
            rows.append(
                (
                    table.path,
                    f"{table.num_embeddings} x {table.embedding_dim}",
                    table.description,
                    _size(table.before),
                    _size(table.after),
                    f"{table.ratio:.1f}",
                    "-" if table.error is None else f"{table.error:.1%}",
                )
            )
        rows.append(_sum("embeddings", self.before, self.after))
        rows.append(_sum("model", self.model_before, self.model_after))
        lines = text_table(rows, left=(0, 2)).splitlines()
        lines.append(f"embeddings were {self.share:.0%} of the model")
        for table in self.tables:
            also = [f"also {name}" for name in table.aliases]
            also += [f"tied to {name}" for name in table.tied]
            if also:
                lines.append(f"{table.path}: {', '.join(also)}")
        for table in self.tables:
            if table.lost is not None:
                lines.append(f"{table.path}: {table.lost}")
            lines += [f"{table.path}: {peer}" for peer in table.peers]
            lines += [line for line in (table.warning(), table.few()) if line]
        if self.uncalibrated:
            lines.append(
                "rows count by the order of ids; calibrate=BATCHES of text like yours loses half "
                "as much at a ratio of 10, or as much at 13 (docs/real-models.md)"
            )
        lines += [f"{path} stays as it is: {why}" for path, why in self.left.items()]
        return "\n".join(lines)


def _sum(name: str, before: int, after: int) -> tuple[str, ...]:
    return name, "", "", _size(before), _size(after), f"{before / after:.1f}", ""


def _size(number: int) -> str:
    return f"{number:,}"


def model_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that saving a model would write, shared ones once."""
    seen: set[Hashable] = set()
    total = 0
    parts: set[int] = set()  # of forms
    for module in model.modules():
        if id(module) in parts:
            continue
        if isinstance(module, Form):
            parts.update(id(part) for part in module.modules())
            total += module.saved_nbytes
            continue
        transient = module._non_persistent_buffers_set
        own: list[Tensor] = [p for p in module._parameters.values() if p is not None]
        own += [b for n, b in module._buffers.items() if b is not None and n not in transient]
        for tensor in own:
            if identity(tensor) not in seen:
                seen.add(identity(tensor))
                total += tensor.numel() * tensor.element_size()
    return total
