"""What compression did to a model: bytes table by table, and of the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

from torch import Tensor, nn

from fairseq_dpq.forms.base import Form

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
    error: float | None  # squared, as a share of the table's squared norm; None if not known
    aliases: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.before / self.after


@dataclass(frozen=True)
class Report:
    """What became of a model's tables, and its size before and after. `print(report)` shows all.

    Sizes are those of the saved tensors. With `trainable` they hold once the model is compact.
    """

    tables: tuple[TableReport, ...]
    model_before: int
    model_after: int
    left: dict[str, str] = field(default_factory=dict)  # tables that stay as they are, and why

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
        lines = _columns(rows)
        lines.append(f"embeddings were {self.share:.0%} of the model")
        for table in self.tables:
            also = [f"also {name}" for name in table.aliases]
            also += [f"tied to {name}" for name in table.tied]
            if also:
                lines.append(f"{table.path}: {', '.join(also)}")
        lines += [f"{path} stays as it is: {why}" for path, why in self.left.items()]
        return "\n".join(lines)


def _sum(name: str, before: int, after: int) -> tuple[str, ...]:
    return name, "", "", _size(before), _size(after), f"{before / after:.1f}", ""


def _size(number: int) -> str:
    return f"{number:,}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i in (0, 2) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def model_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that saving a model would write, shared ones once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for module in model.modules():
        if isinstance(module, Form):
            total += module.saved_nbytes
            continue
        transient = module._non_persistent_buffers_set
        own: list[Tensor] = [p for p in module._parameters.values() if p is not None]
        own += [b for n, b in module._buffers.items() if b is not None and n not in transient]
        for tensor in own:
            key = _place(tensor)
            if key not in seen:
                seen.add(key)
                total += tensor.numel() * tensor.element_size()
    return total


def _place(tensor: Tensor) -> tuple[int, int]:
    return (tensor.data_ptr() or id(tensor)), tensor.numel()
