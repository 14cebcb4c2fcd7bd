"""Rows of labelled texts in CSV and TSV files, read as a stream and checked, and their classes.

Every problem is an error that names the file and the line.
"""

from __future__ import annotations

import csv
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

from experiments.datasets import PrepareError

_LARGEST_FIELD = 1 << 24  # characters; a quote that is never closed stops here
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # of every fairseq dictionary


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


def _lines(path: Path) -> Iterator[str]:
    with open(path, "rb") as stream:  # binary files break lines at LF alone
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise PrepareError(f"{path}, line {number}: not UTF-8 text ({error})") from error
            yield line


def _records(path: Path, tab: bool) -> Iterator[tuple[int, list[str]]]:
    """The fields of each row that has any, with the line where it ends."""
    if tab:
        for number, line in enumerate(_lines(path), start=1):
            if line.strip("\r\n"):
                yield number, line.rstrip("\r\n").split("\t")
        return
    old_limit = csv.field_size_limit(_LARGEST_FIELD)
    reader = csv.reader(_lines(path), strict=True)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as error:
        raise PrepareError(f"{path}, line {reader.line_num}: broken quotes ({error})") from error
    finally:
        csv.field_size_limit(old_limit)


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
    """How many columns a row of this file has, by its first row."""
    first = next(_records(path, columns.tab), None)
    if first is None:
        raise PrepareError(f"{path}: is empty")
    return len(first[1])


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """The texts of a file; PrepareError for whatever is not one."""
    records = _records(path, columns.tab)
    first = next(records, None)
    if first is None:
        raise PrepareError(f"{path}: is empty")
    label = _place(columns.label, first[1], path, columns)
    texts = [_place(name, first[1], path, columns) for name in columns.texts]
    count = columns.count or len(first[1])
    if columns.ragged:
        count = max(label, *texts) + 1
    seen = False
    for line, fields in itertools.chain([first], records):
        skipped = columns.header and not seen and line == first[0]
        if len(fields) < count or (len(fields) > count and not columns.ragged):
            if skipped and columns.ragged:
                continue
            least = "at least " if columns.ragged else ""
            raise PrepareError(
                f"{path}, line {line}: {len(fields)} columns, expected {least}{count}"
            )
        if skipped or (columns.only and fields[columns.only[0] - 1] != columns.only[1]):
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
            return list(dict.fromkeys(self.names.values()))
        numbers = all(re.fullmatch(r"-?\d{1,9}", stored) for stored in self.names)
        order = sorted(self.names, key=lambda s: (int(s) if numbers else 0, s))
        return [self.names[stored] for stored in order]
