"""What compression brings, in the same three lines everywhere: the embeddings, the model without
optimiser state, the file. The second is the one that counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from fairseq_dpq.files.errors import printable


@dataclass(frozen=True)
class Change:
    """Bytes before and after."""

    before: int
    after: int

    @property
    def ratio(self) -> float:
        return self.before / max(self.after, 1)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {"before": self.before, "after": self.after, "ratio": self.ratio}

    def smaller(self) -> str:
        """The ratio in words: `21.0x smaller`."""
        if self.ratio < 1:
            return f"{1 / self.ratio:.2f}x larger"
        return f"{self.ratio:.2f}x smaller"


@dataclass(frozen=True)
class Left:
    """A matrix with a row for each symbol that stays as it is."""

    name: str
    nbytes: int
    compact: int  # what would be left of it
    how: str  # the flag that would do it


def size_lines(
    embeddings: Change, model: Change | None, file: Change, about_file: str = ""
) -> list[str]:
    """The three lines. A file without a model has two; one that is not changed has one size."""
    part = f"{share(embeddings.before, model.before)} of the model" if model else ""
    rows = [("embeddings", embeddings, part)]
    rows += [("model", model, "without optimiser state")] if model else []
    rows += [("file", file, about_file)]
    width = max(len(f"{change.before:,}") for _, change, _ in rows)
    small = max(len(f"{change.after:,}") for _, change, _ in rows)
    lines = []
    for name, change, note in rows:
        changed = f" -> {change.after:>{small},} bytes, {change.smaller()}"
        line = f"{name:<10}  {change.before:>{width},}"
        line += changed if change.before != change.after else " bytes"
        lines.append(line + (f" ({note})" if note else ""))
    return lines


def outlook(model: Change, left: Sequence[Left]) -> list[str]:
    """What compressing the others too would bring, one after the other."""
    lines, after = [], model.after
    for item in left:
        after -= item.nbytes - item.compact
        lines.append(
            f"{item.name} stays full ({share(item.nbytes, model.before)} of the model); with "
            f"{item.how} the model would be {Change(model.before, after).smaller()}"
        )
    return lines


def share(part: int, whole: int) -> str:
    """A share in percent."""
    return f"{100 * part / max(whole, 1):.1f} %"


def text_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows as text in columns, right-aligned but for those in `left`."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    form = "  ".join(f"{{:{'<' if i in left else '>'}{w}}}" for i, w in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in rows)
