"""Rows of labelled texts in CSV and TSV files, read as a stream and checked; their classes; and the
lines that are written of them.

Every problem is an error that names the file and the line.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

from experiments.datasets import PrepareError
from experiments.datasets.text import LineWriter, read_lines

SPLITS = ("train", "valid", "test")
csv.field_size_limit(1 << 24)  # characters; a quote that is never closed stops here


class Row(NamedTuple):
    """Texts as they are stored, and the line of the file where they end."""

    label: str
    texts: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Columns:
    """Where label and texts are. Columns are counted from 1, or named by the header."""

    label: str = "1"
    texts: tuple[str, ...] = ("2",)
    count: int | None = None  # how many a row has, if that is known
    header: bool = False
    tab: bool = False  # columns are separated by tabs, and a quote is a plain character
    escaped_newlines: bool = False  # a line break is written as backslash and n
    ragged: bool = False  # rows may have further columns, and the header others
    only: tuple[int, str] | None = None  # leave out rows that do not have this in this column

    @property
    def by_name(self) -> bool:
        """Whether a header alone says where they are, so that other columns may differ."""
        return self.header and not any(name.isdecimal() for name in (self.label, *self.texts))


def _records(path: Path, tab: bool) -> Iterator[tuple[int, list[str]]]:
    """The fields of each row that has any, with the line where it ends."""
    if tab:
        for number, line in enumerate(read_lines(path), start=1):
            if line.strip("\r\n"):
                yield number, line.rstrip("\r\n").split("\t")
        return
    reader = csv.reader(read_lines(path), strict=True)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as error:
        raise PrepareError(f"{path}, line {reader.line_num}: broken quotes ({error})") from error


def _place(name: str, names: Sequence[str], path: Path, columns: Columns) -> int:
    """The index of a column given by number or by name."""
    if name.isdecimal():
        if not columns.ragged and not 1 <= int(name) <= len(names):
            raise PrepareError(f"{path}: no column {name}, its first row has {len(names)}")
        return int(name) - 1
    if not columns.header:
        raise PrepareError(f"column {name!r}: names need --header; else give a number from 1")
    if list(names).count(name) != 1:
        raise PrepareError(f"{path}: no single column {name!r}; it has {', '.join(names)}")
    return list(names).index(name)


def count_columns(path: Path, columns: Columns) -> int:
    """How many columns a row of this file has, by its first row; 0 if there is none."""
    return len(next(_records(path, columns.tab), (0, []))[1])


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """The texts of a file; PrepareError for whatever is not one."""
    records = _records(path, columns.tab)
    first = next(records, None)
    if first is None:
        raise PrepareError(f"{path}: is empty")
    label, *texts = (
        _place(name, first[1], path, columns) for name in (columns.label, *columns.texts)
    )
    count = max(label, *texts) + 1 if columns.ragged else columns.count or len(first[1])
    seen = False
    for line, fields in records if columns.header else chain([first], records):
        if len(fields) < count or (len(fields) > count and not columns.ragged):
            least = "at least " if columns.ragged else ""
            raise PrepareError(
                f"{path}, line {line}: {len(fields)} columns, expected {least}{count}"
            )
        if columns.only and fields[columns.only[0] - 1] != columns.only[1]:
            continue
        found = tuple(fields[i] for i in texts)
        if columns.escaped_newlines:
            found = tuple(text.replace("\\n", " ") for text in found)
        if not fields[label].strip():
            raise PrepareError(f"{path}, line {line}: the label is empty")
        seen = True
        yield Row(fields[label].strip(), found, line)
    if not seen:
        raise PrepareError(f"{path}: no rows in it")


@dataclass
class Labels:
    """Classes by their names in the files."""

    names: dict[str, str] = field(default_factory=dict)  # as stored -> as in the dictionary
    open: bool = False  # whether a row may still add one

    def find(self, row: Row, path: Path) -> str:
        """The class of a row; PrepareError if there is no such class."""
        if self.open:  # a dictionary entry is a single token
            self.names.setdefault(row.label, re.sub(r"\s+", "_", row.label))
        if row.label not in self.names:
            known = ", ".join(list(self.names)[:20])
            raise PrepareError(
                f"{path}, line {row.line}: unknown label {row.label!r}; the classes are {known}"
            )
        return self.names[row.label]

    def close(self, path: Path) -> None:
        """All training rows have been read. Classes that they added are put into the order of
        numbers, or of letters."""
        if self.open:
            numbers = all(re.fullmatch(r"-?\d{1,9}", stored) for stored in self.names)
            order = sorted(self.names, key=lambda s: (int(s) if numbers else 0, s))
            self.names = {stored: self.names[stored] for stored in order}
        self.open = False
        if len(self.names) < 2:
            raise PrepareError(f"{path}: all labels are equal; a classifier needs two classes")


class Split(LineWriter):
    """Writes the rows of a split, FOLDER/SPLIT.input0, ... and FOLDER/SPLIT.label, and counts."""

    def __init__(self, folder: Path, name: str, sides: int = 1) -> None:
        self.parts = [*(f"input{side}" for side in range(sides)), "label"]
        super().__init__(folder / name, self.parts)
        self.labels: Counter[str] = Counter()
        self.words: Counter[str] = Counter()  # or pieces
        self.rows = self.length = self.empty = 0

    def add(self, texts: Sequence[str], label: str) -> None:
        """Texts as words or pieces, separated by spaces."""
        self.write(*texts, label)
        words = [word for text in texts for word in text.split()]
        self.labels[label] += 1
        self.words.update(words)
        self.rows += 1
        self.length += len(words)
        self.empty += not words
