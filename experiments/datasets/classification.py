"""From rows of label and text to a folder in the layout of fairseq's sentence_prediction.

A part of the training rows is held out as `valid`, so that no test row chooses a checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Iterable, Iterator, Sequence

from experiments.datasets.binarize import dictionary_size, preprocess_parts
from experiments.datasets.cli import Result, Run
from experiments.datasets.errors import PrepareError
from experiments.datasets.rows import Columns, Row, count_columns, read_rows
from experiments.datasets.text import CHUNK, ordered_map
from fairseq_dpq.cli.classify import split_words

PARTS = ("input0", "label")  # words and classes
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # of every fairseq dictionary
SPLITS = ("train", "valid", "test")


@dataclass
class Labels:
    """Classes by their names in the files. Without a list, the training rows give them."""

    names: dict[str, str] = field(default_factory=dict)  # as stored -> as in the dictionary
    listed: bool = True
    open: bool = False  # whether a row may still add one

    def find(self, stored: str, path: Path, line: int) -> str:
        """The class of a row; PrepareError if there is no such class."""
        if stored not in self.names:
            if not self.open:
                known = ", ".join(list(self.names)[:20])
                raise PrepareError(
                    f"{path}, line {line}: unknown label {stored!r}; the classes are {known}"
                )
            name = re.sub(r"\s+", "_", stored)  # a dictionary entry is a single token
            if name in _SPECIAL:
                raise PrepareError(
                    f"{path}, line {line}: {name!r} cannot be a label, because fairseq's "
                    "dictionaries use it themselves; rename it"
                )
            if name in self.names.values():
                raise PrepareError(f"{path}, line {line}: two labels would be called {name!r}")
            self.names[stored] = name
        return self.names[stored]

    def close(self, path: Path) -> None:
        """All training rows have been read."""
        self.open = False
        if len(self.names) < 2:
            raise PrepareError(f"{path}: all labels are equal; a classifier needs two classes")

    def in_order(self) -> list[str]:
        """Classes as listed; else numbers by their value, other labels by their letters."""
        if self.listed:
            return list(self.names.values())
        numbers = all(re.fullmatch(r"-?\d{1,9}", stored) for stored in self.names)
        order = sorted(self.names, key=lambda s: (int(s) if numbers else 0, s))
        return [self.names[stored] for stored in order]


@dataclass(frozen=True)
class Plan:
    """What to read and how to split it."""

    files: dict[str, Path]  # train, perhaps valid and test
    columns: Columns
    labels: Labels
    held_out: float
    seed: int
    min_count: int

    @property
    def splits(self) -> list[str]:
        return [split for split in SPLITS if split == "valid" or split in self.files]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every text classification set."""
    add = parser.add_argument
    add("--held-out", type=float, default=0.05, metavar="F",
        help="part of the training rows that becomes valid (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=1, metavar="N",
        help="chooses which rows are held out (default: %(default)s)")  # fmt: skip
    add("--min-count", type=int, default=1, metavar="N",
        help="leave out words that are rarer in train (default: %(default)s)")  # fmt: skip


def read_flags(args: argparse.Namespace) -> Result:
    """The values of these flags, checked; they are part of the stamp."""
    if not 0 < args.held_out < 1:
        raise PrepareError(f"--held-out {args.held_out}: must be between 0 and 1; try 0.05")
    if args.min_count < 1:
        raise PrepareError(f"--min-count {args.min_count}: must be at least 1")
    return {"held_out": args.held_out, "seed": args.seed, "min_count": args.min_count}


def is_held_out(words: str, fraction: float, seed: int) -> bool:
    """Whether a document belongs to `valid`. Equal documents are on the same side."""
    digest = hashlib.blake2b(words.encode("utf-8"), digest_size=8, key=b"%d" % seed).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def _split_all(rows: Sequence[Row]) -> list[list[str]]:
    return [split_words(row.text) for row in rows]


def _documents(path: Path, columns: Columns, workers: int) -> Iterator[tuple[Row, list[str]]]:
    """The rows of a file with their words, which several processes split."""
    waiting: list[list[Row]] = []

    def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
        stream = iter(rows)
        for chunk in iter(lambda: list(islice(stream, CHUNK)), []):
            waiting.append(chunk)
            yield chunk

    for words in ordered_map(_split_all, chunks(read_rows(path, columns)), workers):
        yield from zip(waiting.pop(0), words)


class _Writer:
    """The text of a split, one document and one label per line, and its words."""

    def __init__(self, folder: Path, split: str, stack: ExitStack) -> None:
        self.documents = self.empty = 0
        self.words: Counter[str] = Counter()
        paths = [folder / f"{split}.{part}" for part in PARTS]
        self._text, self._labels = (stack.enter_context(path.open("wb")) for path in paths)

    def add(self, words: list[str], label: str) -> None:
        self.documents += 1
        self.empty += not words
        self.words.update(words)
        self._text.write((" ".join(words) + "\n").encode("utf-8"))
        self._labels.write((label + "\n").encode("utf-8"))


def _write_text(plan: Plan, folder: Path, workers: int) -> dict[str, _Writer]:
    """Write the text of all splits. Unless a header names them, all files have the columns of the
    training file."""
    columns = plan.columns
    if columns.count is None and not columns.by_name:
        columns = replace(columns, count=count_columns(plan.files["train"], columns))
    with ExitStack() as stack:
        writers = {split: _Writer(folder, split, stack) for split in plan.splits}
        for split, path in plan.files.items():
            for row, words in _documents(path, columns, workers):
                place = split
                if split == "train" and "valid" not in plan.files:
                    held_out = is_held_out(" ".join(words), plan.held_out, plan.seed)
                    place = "valid" if held_out else "train"
                writers[place].add(words, plan.labels.find(row.label, path, row.line))
            if split == "train":
                plan.labels.close(path)
    for split in plan.splits:
        if not writers[split].documents:
            raise PrepareError(
                f"{plan.files['train']}: --held-out {plan.held_out} leaves no rows for {split}"
            )
    return writers


def _write_dictionaries(plan: Plan, folder: Path, words: Counter[str]) -> set[str]:
    """Write dict.input0 and dict.label; the words of the first one."""
    kept = [(word, count) for word, count in words.items() if count >= plan.min_count]
    if not kept:
        raise PrepareError(f"{plan.files['train']}: no words in it (--min-count {plan.min_count})")
    kept.sort(key=lambda item: (-item[1], item[0]))
    entries = [kept, [(name, 1) for name in plan.labels.in_order()]]
    for part, lines in zip(PARTS, entries):
        text = "".join(f"{word} {count}\n" for word, count in lines)
        (folder / f"dict.{part}").write_bytes(text.encode("utf-8"))
    return {word for word, _ in kept}


def build(run: Run, plan: Plan, folder: Path) -> Result:
    """Fill the folder; counts of documents, words and types."""
    text = folder / "text"
    text.mkdir()
    try:
        writers = _write_text(plan, text, run.workers)
        known = _write_dictionaries(plan, text, writers["train"].words)
        own_valid = "valid" in plan.files
        types = set(writers["train"].words) | ({} if own_valid else writers["valid"].words).keys()
        dictionaries = {part: text / f"dict.{part}" for part in PARTS}
        preprocess_parts(folder, text, dictionaries, plan.splits, run.workers)
    finally:
        shutil.rmtree(text)
    counts = {
        split: [
            writer.documents,
            sum(writer.words.values()),
            sum(count for word, count in writer.words.items() if word not in known),
            writer.empty,
        ]
        for split, writer in writers.items()
    }
    return {
        "counts": counts,
        "types": len(types),
        "dictionary": dictionary_size(folder / "input0" / "dict.txt"),
        "classes": plan.labels.in_order(),
    }


def report(result: Result, paper_types: int | None = None) -> list[str]:
    """The last lines of a prepare script."""
    lines = []
    for split in SPLITS:
        if split in result["counts"]:
            documents, words, unknown, empty = result["counts"][split]
            line = f"{split}: {documents:,} documents, {words:,} words, {unknown:,} unknown"
            lines.append(line + (f"; {empty:,} documents without words" if empty else ""))
    classes = ", ".join(result["classes"][:20])
    paper = f" (the paper's table has {paper_types:,} rows)" if paper_types else ""
    return [
        *lines,
        f"{len(result['classes'])} classes: {classes}",
        f"{result['types']:,} types in the training file{paper}; "
        f"{result['dictionary']:,} dictionary entries in fairseq",
    ]
