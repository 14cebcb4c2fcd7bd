"""Rows of labelled documents in CSV and TSV files, read as a stream and checked.

Every problem is an error that names the file and the line.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

from experiments.datasets.errors import PrepareError

_LARGEST_FIELD = 1 << 24  # characters; a quote that is never closed stops here


class Row(NamedTuple):
    """A document as it is stored, and the line of the file where it ends."""

    label: str
    text: str
    line: int


@dataclass(frozen=True)
class Columns:
    """Where label and text are. Columns are counted from 1, or named by the header."""

    label: str = "1"
    texts: tuple[str, ...] = ("2",)
    count: int | None = None  # how many a row has, if that is known
    header: bool = False
    tab: bool = False  # columns are separated by tabs, and a quote is a plain character
    escaped_newlines: bool = False  # a line break is written as backslash and n

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
    old_limit = csv.field_size_limit(_LARGEST_FIELD)
    if tab:
        reader = csv.reader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.reader(_lines(path), strict=True)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as error:
        raise PrepareError(f"{path}, line {reader.line_num}: broken quotes ({error})") from error
    finally:
        csv.field_size_limit(old_limit)


def _place(name: str, names: Sequence[str], path: Path, header: bool) -> int:
    """The index of a column given by number or by name."""
    if name.isdecimal():
        if not 1 <= int(name) <= len(names):
            raise PrepareError(f"{path}: no column {name}, its first row has {len(names)}")
        return int(name) - 1
    if not header:
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
    """The documents of a file; PrepareError for whatever is not one."""
    records = _records(path, columns.tab)
    first = next(records, None)
    if first is None:
        raise PrepareError(f"{path}: is empty")
    count = columns.count or len(first[1])
    if len(first[1]) != count:
        raise _wrong_count(path, *first, count)
    label = _place(columns.label, first[1], path, columns.header)
    texts = [_place(name, first[1], path, columns.header) for name in columns.texts]
    seen = False
    for line, fields in _chain(None if columns.header else first, records):
        if len(fields) != count:
            raise _wrong_count(path, line, fields, count)
        text = " ".join(fields[i] for i in texts)
        if columns.escaped_newlines:
            text = text.replace("\\n", " ")
        if not fields[label].strip():
            raise PrepareError(f"{path}, line {line}: the label is empty")
        seen = True
        yield Row(fields[label].strip(), text, line)
    if not seen:
        raise PrepareError(f"{path}: no documents in it")


def _chain(
    first: tuple[int, list[str]] | None, rest: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, list[str]]]:
    if first is not None:
        yield first
    yield from rest


def _wrong_count(path: Path, line: int, fields: list[str], count: int) -> PrepareError:
    return PrepareError(f"{path}, line {line}: {len(fields)} columns, expected {count}")
