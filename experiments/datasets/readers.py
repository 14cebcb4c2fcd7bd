"""Corpus formats of WMT: TSV, TMX, SGM and pairs of plain files, read as streams.

A reader splits its file into tasks; `clean_chunk` turns a task into pairs in a worker.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence
from xml.etree import ElementTree

from experiments.datasets import PrepareError
from experiments.datasets.download import progress
from experiments.datasets.pairs import Lines, parallel_chunks
from experiments.datasets.text import clean

_BLOCK = 1 << 19
_TU = re.compile(rb"<tu[\s>].*?</tu>", re.DOTALL)
_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"

BREAK = "document break (both sides empty)"
EMPTY = "one side empty"
MALFORMED = "malformed (no second column, or broken markup)"
ENCODING = "not UTF-8"


class Task(NamedTuple):
    """A part of a corpus for one worker: bytes of one file, or lines of two."""

    kind: str
    english_first: bool
    payload: Any


class Cleaned(NamedTuple):
    """English and German text with the same number of lines, and counts of dropped pairs."""

    english: bytes
    german: bytes
    counts: Counter[str]


def blocks(path: Path) -> Iterator[bytes]:
    """The content of a plain or gzipped file in blocks, with a progress bar."""
    with open(path, "rb") as disk:
        packed = disk.read(2) == b"\x1f\x8b"
        disk.seek(0)
        stream = gzip.GzipFile(fileobj=disk) if packed else disk
        seen = 0
        with progress(path.stat().st_size, path.name) as bar:
            try:
                for block in iter(lambda: stream.read(_BLOCK), b""):
                    yield block
                    bar.update(disk.tell() - seen)
                    seen = disk.tell()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise PrepareError(f"{path}: cut short or damaged ({error})") from error


def kind_of(names: Sequence[str]) -> str:
    """The format of a corpus with these files."""
    return "plain" if len(names) == 2 else "tmx" if ".tmx" in names[0] else "tsv"


def read_tasks(paths: Sequence[Path]) -> Iterator[Task]:
    """The tasks of a corpus: one file, or a German and an English one."""
    kind = kind_of([path.name for path in paths])
    if kind == "plain":
        with progress(paths[0].stat().st_size, paths[0].name) as bar:
            for lines in parallel_chunks(paths):
                yield Task(kind, False, lines)
                bar.update(sum(map(len, lines[0])))
    elif kind == "tmx":
        for part in _split_tmx(paths[0]):
            yield Task(kind, True, part)
    else:
        # The columns of ParaCrawl, whose text is a .txt, are in the other order.
        for part in _split_lines(paths[0]):
            yield Task(kind, ".txt" in paths[0].name, part)


def _split_lines(path: Path) -> Iterator[bytes]:
    """Whole lines of a TSV file. No CSV reader: quotes in these files are plain characters."""
    rest = b""
    for block in blocks(path):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        yield rest + head + b"\n"
        rest = tail
    if rest:
        yield rest


def _split_tmx(path: Path) -> Iterator[bytes]:
    """Whole <tu> elements of a TMX file; the XML itself is parsed by the workers."""
    rest = b""
    body = False
    for block in blocks(path):
        rest += block
        if not body:
            if rest[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise PrepareError(f"{path}: TMX in UTF-16, expected UTF-8")
            match = re.search(rb"<body[^>]*>", rest)
            if match is None:
                if len(rest) > 1 << 24:
                    raise PrepareError(f"{path}: no <body> of a TMX file")
                continue
            rest, body = rest[match.end() :], True
        end = rest.rfind(b"</tu>")
        if end >= 0:
            end += len(b"</tu>")
            yield rest[:end]
            rest = rest[end:]
    if not body or b"</body>" not in rest:
        raise PrepareError(f"{path}: not a whole TMX file (no </body> at its end)")


def _tsv_pairs(payload: bytes) -> Iterator[tuple[str, str] | str]:
    lines = payload.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for line in lines:
        try:
            columns = line.decode("utf-8").split("\t")
        except UnicodeDecodeError:
            yield ENCODING
            continue
        if len(columns) < 2:
            yield MALFORMED if columns[0].strip() else BREAK
        else:
            yield columns[0], columns[1]  # further columns are not text


def _plain_pairs(lines: Lines) -> Iterator[tuple[str, str] | str]:
    for one, other in zip(*lines):
        try:
            yield one.decode("utf-8"), other.decode("utf-8")
        except UnicodeDecodeError:
            yield ENCODING


def _tmx_pairs(payload: bytes) -> Iterator[tuple[str, str] | str]:
    try:
        units = list(ElementTree.fromstring(b"<body>" + payload + b"</body>").iter("tu"))
    except ElementTree.ParseError:
        # One bad character must not discard thousands of other pairs.
        units = []
        for match in _TU.finditer(payload):
            try:
                units.append(ElementTree.fromstring(match.group()))
            except ElementTree.ParseError:
                yield MALFORMED
    for unit in units:
        sides: dict[str, str] = {}
        for variant in unit.iter("tuv"):
            language = variant.get(_XML_LANG) or variant.get("lang") or ""
            segment = variant.find("seg")
            if segment is not None:
                sides.setdefault(language.lower()[:2], "".join(segment.itertext()))
        yield (sides["en"], sides["de"]) if sides.keys() >= {"en", "de"} else MALFORMED


def clean_chunk(task: Task) -> Cleaned:
    """The clean pairs of a task; counts hold "read", "kept" and one entry per reason."""
    read = _tsv_pairs if task.kind == "tsv" else _tmx_pairs
    pairs = _plain_pairs(task.payload) if task.kind == "plain" else read(task.payload)
    counts: Counter[str] = Counter()
    english: list[str] = []
    german: list[str] = []
    for pair in pairs:
        counts["read"] += 1
        if isinstance(pair, str):
            counts[pair] += 1
            continue
        first, second = clean(pair[0]), clean(pair[1])
        if not first or not second:
            counts[EMPTY if first or second else BREAK] += 1
            continue
        counts["kept"] += 1
        english.append(first if task.english_first else second)
        german.append(second if task.english_first else first)
    return Cleaned(_join(english), _join(german), counts)


def _join(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode("utf-8")


_SGM = re.compile(
    r"<doc\b[^>]*?\bdocid=\"(?P<doc>[^\"]*)\"|<seg\b[^>]*?\bid=\"(?P<seg>[^\"]*)\"[^>]*>"
    r"(?P<text>.*?)</seg>",
    re.DOTALL | re.IGNORECASE,
)


def read_sgm(path: Path) -> list[tuple[str, str, str]]:
    """(document, segment, text) of an SGM file; white space collapsed, entities as they are.

    sacreBLEU reads its references in the same way, so scores agree with its own copies.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path}: not UTF-8 text ({error})") from error
    document = ""
    segments: list[tuple[str, str, str]] = []
    for match in _SGM.finditer(content):
        if match.group("seg") is None:
            document = match.group("doc")
        else:
            text = " ".join(match.group("text").split())
            segments.append((document, match.group("seg"), text))
    if not segments:
        raise PrepareError(f"{path}: no <seg> in it, so not an SGM test set")
    return segments


def read_sgm_pair(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Source and reference of a test set; every segment must have its counterpart."""
    left, right = read_sgm(source), read_sgm(target)
    if len(left) != len(right):
        raise PrepareError(f"{source} has {len(left)} segments, {target} has {len(right)}")
    for one, other in zip(left, right):
        if one[:2] != other[:2]:
            raise PrepareError(
                f"{source} has segment {one[1]} of {one[0]} where {target} has segment "
                f"{other[1]} of {other[0]}"
            )
    return [item[2] for item in left], [item[2] for item in right]
