"""From the rows of a table to commands: what each row takes, in order, and where it puts it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Sequence

from fairseq_dpq.reproduce.rows import CPU, CPU_ENVIRONMENT, SUBSET, TABLES, WIDTH, Row, Table

SCALES = ("cpu", "paper")
_LEARN = "--form additive_codes --dpq-K 32 --dpq-D 32"


class ReproduceError(Exception):
    """What the user can put right, in one line."""


@dataclass
class Step:
    """One command: its words, its environment, where its output goes, the file that it makes."""

    words: list[str]
    log: Path
    makes: Path | None = None  # nothing to do where it is there
    environment: dict[str, str] = field(default_factory=dict)
    resumes: bool = False  # run again, it goes on where it was broken off

    def __str__(self) -> str:
        before = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*before, *map(shlex.quote, self.words)])


@dataclass
class Planned:
    """A row at one scale, with its folder and its steps."""

    row: Row
    recipe: str
    metric: str
    folder: Path
    steps: list[Step] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As --rows takes it."""
        return f"{self.recipe}/{self.folder.name}"


def slug(label: str) -> str:
    """A label as a folder's name."""
    text = label.lower().replace("+", " plus").replace("'", "")
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def find_table(name: str) -> Table:
    """A table by its name, in any case."""
    table = TABLES.get(name.upper())
    if table is None:
        raise ReproduceError(f"TABLE {name!r} is unknown; choose one of {', '.join(TABLES)}")
    return table


def plan(
    table: Table,
    scale: str,
    out: Path,
    wanted: Sequence[str] = (),
    more: Sequence[str] = (),
    subset: str | None = None,
) -> list[Planned]:
    """The rows of a table, and before each what it starts from; `more` are further flags of every
    training, `subset` is the split to score. With `wanted`, only the rows of these names, or, where
    a word is no name, all whose names hold it."""
    found: dict[str, Planned] = {}
    listed = []
    places = [_place(row, table, scale, out) for row in table.rows if _runs(row, scale)]
    names = list(dict.fromkeys(item.name for item in places))
    meant = {w: [n for n in names if (n == w if w in names else w in n)] for w in wanted}
    nothing = [word for word, found_names in meant.items() if not found_names]
    if nothing:
        raise ReproduceError(
            f"no row of this table has a name with {' or '.join(nothing)}; it has "
            + ", ".join(names)
        )
    chosen = {name for found_names in meant.values() for name in found_names}
    for item in places:
        row = item.row
        if wanted and item.name not in chosen:
            continue
        for other in _before(row, table, scale, out):
            found.setdefault(other.name, other)
        found.setdefault(item.name, item)
        listed.append(item.name)
    if not listed:
        raise ReproduceError(f"no row of this table runs at --scale {scale}")
    for item in found.values():
        item.steps = _steps(item, scale, out, more, subset)
    return list(found.values())


def _runs(row: Row, scale: str) -> bool:
    return scale != "cpu" or row.recipe in CPU


def _place(row: Row, table: Table, scale: str, out: Path) -> Planned:
    recipe = CPU[row.recipe][0] if scale == "cpu" else row.recipe
    return Planned(row, recipe, row.metric or table.metric, out / recipe / slug(row.label))


def _before(row: Row, table: Table, scale: str, out: Path) -> list[Planned]:
    """Rows that another one starts from: the full table, or a pre-trained model."""
    if row.pretrained:
        before = Row(row.label, row.pretrained, row.method, metric="masked perplexity")
        return [_place(before, table, scale, out)]
    if row.quantize or "@full" in row.flags or "@codes" in row.flags:
        return [_place(Row("full", row.recipe), table, scale, out)]
    return []


def _steps(
    item: Planned, scale: str, out: Path, more: Sequence[str], subset: str | None
) -> list[Step]:
    row, folder = item.row, item.folder
    full = out / item.recipe / "full" / "checkpoint_best.pt"
    codes = full.with_name("codes.safetensors")
    if row.quantize:
        small = folder / "compact.pt"
        stored_as = _fill_in_width(row.quantize, item.recipe)
        words = ["fairseq-dpq-quantize", str(full), str(small), *stored_as.split()]
        steps = [Step([*words, "--force", "--json"], folder / "compact.json", small)]
        return [*steps, _score(item, small, subset)]
    steps = []
    if "@codes" in row.flags:
        stored = full.with_name("additive.pt")
        words = ["fairseq-dpq-quantize", str(full), str(stored), *_LEARN.split(), "--force"]
        steps.append(Step(words, full.with_name("additive.log"), stored))
        words = ["fairseq-dpq-export", str(stored), str(codes), "--force"]
        steps.append(Step(words, full.with_name("export.log"), codes))
    flags = row.flags.replace("@full", str(full)).replace("@codes", str(codes)).split()
    flags += CPU[row.recipe][1].split() if scale == "cpu" else []
    environment = {"SAVE_DIR": str(folder)}
    if scale == "cpu":
        environment.update(CPU_ENVIRONMENT.get(row.recipe, {}))
    if row.pretrained:
        model = CPU[row.pretrained][0] if scale == "cpu" else row.pretrained
        before = out / model / slug(row.label) / "checkpoint_best.pt"
        environment["PRETRAINED"] = str(before)
    words = ["scripts/train.sh", item.recipe, row.method, *flags, *more]
    steps.append(Step(words, folder / "train.log", None, environment, resumes=True))
    # Fine-tuning ends with its last epoch, as BERT's own script does.
    best = folder / ("checkpoint_last.pt" if row.pretrained else "checkpoint_best.pt")
    if row.full:
        return [*steps, _score(item, best, subset)]
    small = folder / "compact.pt"
    words = ["fairseq-dpq-compact", str(best), str(small), "--force", "--json"]
    steps.append(Step(words, folder / "compact.json", small))
    return [*steps, _score(item, small, subset)]


def _fill_in_width(flags: str, recipe: str) -> str:
    """Flags with @width/N replaced by the Nth part of the recipe's embedding size."""
    return re.sub(r"@width/(\d+)", lambda m: str(WIDTH[recipe] // int(m.group(1))), flags)


def _score(item: Planned, checkpoint: Path, subset: str | None) -> Step:
    words = ["scripts/score.sh", item.recipe, str(checkpoint)]
    if subset is not None:
        words += [SUBSET[item.metric], subset]
    return Step(words, item.folder / "score.log")
