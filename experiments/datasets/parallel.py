"""Parallel text: pairs of plain files and the formats of WMT (TSV, TMX, SGM), read as streams,
cleaned, and encoded as pieces.

A corpus is split into tasks, which workers turn into pairs of sentences. A joint SentencePiece
model encodes both sides. Its ids 0-3 are fairseq's specials, so piece ids and dictionary indices
are equal.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Sequence, Tuple, Union
from xml.etree import ElementTree

from experiments.datasets import PrepareError
from experiments.datasets.download import progress
from experiments.datasets.pieces import SentencePieces
from experiments.datasets.text import (
    LineWriter,
    chunked,
    clean,
    open_bytes,
    ordered_map,
    read_lines,
)

LANGUAGES = ("en", "de")
_BLOCK = 1 << 19
_TU = re.compile(rb"<tu[\s>].*?</tu>", re.DOTALL)
_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"

BREAK = "document break (both sides empty)"
EMPTY = "one side empty"
MALFORMED = "malformed (no second column, or broken markup)"
ENCODING = "not UTF-8"

Lines = List[Tuple[bytes, bytes]]
Pairs = Iterator[Union[Tuple[str, str], str]]  # German and English, or why a pair is dropped
Task = Tuple[Callable[[Any], Pairs], Any]  # what reads a part of a corpus, and that part


def _raw_lines(path: Path) -> Iterator[bytes]:
    with open_bytes(path) as stream:
        yield from stream  # split at LF alone


def parallel_lines(
    paths: Sequence[Path], read: Callable[[Path], Iterator[Any]] = _raw_lines
) -> Iterator[tuple[Any, Any]]:
    """Lines of two parallel files; PrepareError if one of them is longer."""
    for number, pair in enumerate(zip_longest(*map(read, paths))):
        if None in pair:
            short, long = paths if pair[0] is None else reversed(paths)
            raise PrepareError(f"{short} has {number} lines, {long} has more: not parallel")
        yield pair


def read_tasks(paths: Sequence[Path]) -> Iterator[Task]:
    """The tasks of a corpus: one file, or a German and an English one."""
    name = paths[0].name
    if len(paths) == 2:
        yield from ((_plain_pairs, lines) for lines in chunked(parallel_lines(paths)))
    elif ".tmx" in name:
        yield from ((_tmx_pairs, part) for part in _split_tmx(paths[0]))
    else:
        # The columns of ParaCrawl, whose text is a .txt, are in the other order.
        read = _english_first if ".txt" in name else _tsv_pairs
        yield from ((read, lines) for lines in chunked(_raw_lines(paths[0])))


def _split_tmx(path: Path) -> Iterator[bytes]:
    """Whole <tu> elements of a TMX file; the XML itself is parsed by the workers."""
    rest = b""
    body = False
    with open_bytes(path) as stream:
        for block in iter(lambda: stream.read(_BLOCK), b""):
            rest += block
            if not body:
                match = re.search(rb"<body[^>]*>", rest)
                if match is None:
                    if len(rest) > 1 << 24:
                        raise PrepareError(f"{path}: no <body> of a TMX file in UTF-8")
                    continue
                rest, body = rest[match.end() :], True
            end = rest.rfind(b"</tu>")
            if end >= 0:
                end += len(b"</tu>")
                yield rest[:end]
                rest = rest[end:]
    if not body or b"</body>" not in rest:
        raise PrepareError(f"{path}: not a whole TMX file (no </body> at its end)")


def _tsv_pairs(lines: list[bytes]) -> Pairs:
    # No CSV reader: quotes in these files are plain characters.
    for line in lines:
        try:
            columns = line.decode("utf-8").rstrip("\n").split("\t")
        except UnicodeDecodeError:
            yield ENCODING
            continue
        if len(columns) < 2:
            yield MALFORMED if columns[0].strip() else BREAK
        else:
            yield columns[0], columns[1]  # further columns are not text


def _english_first(lines: list[bytes]) -> Pairs:
    for pair in _tsv_pairs(lines):
        yield pair if isinstance(pair, str) else pair[::-1]


def _plain_pairs(lines: Lines) -> Pairs:
    for german, english in lines:
        try:
            yield german.decode("utf-8"), english.decode("utf-8")
        except UnicodeDecodeError:
            yield ENCODING


def _tmx_pairs(payload: bytes) -> Pairs:
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
        yield (sides["de"], sides["en"]) if sides.keys() >= {"en", "de"} else MALFORMED


def clean_chunk(task: Task) -> tuple[bytes, bytes, Counter[str]]:
    """The clean pairs of a task as English and German lines; counts hold "read", "kept" and one
    entry per reason."""
    read, payload = task
    counts: Counter[str] = Counter()
    sides: tuple[list[str], list[str]] = ([], [])
    for pair in read(payload):
        counts["read"] += 1
        if isinstance(pair, str):
            counts[pair] += 1
            continue
        german, english = map(clean, pair)
        if not german or not english:
            counts[EMPTY if german or english else BREAK] += 1
            continue
        counts["kept"] += 1
        sides[0].append(english + "\n")
        sides[1].append(german + "\n")
    return "".join(sides[0]).encode("utf-8"), "".join(sides[1]).encode("utf-8"), counts


_SGM = re.compile(
    r"<doc\b[^>]*?\bdocid=\"(?P<doc>[^\"]*)\"|<seg\b[^>]*?\bid=\"(?P<seg>[^\"]*)\"[^>]*>"
    r"(?P<text>.*?)</seg>",
    re.DOTALL | re.IGNORECASE,
)


def _read_sgm(path: Path) -> list[tuple[str, str, str]]:
    """(document, segment, text) of an SGM file; white space collapsed, entities as they are.

    sacreBLEU reads its references in the same way, so scores agree with its own copies.
    """
    document = ""
    segments: list[tuple[str, str, str]] = []
    for match in _SGM.finditer("".join(read_lines(path))):
        if match.group("seg") is None:
            document = match.group("doc")
        else:
            text = " ".join(match.group("text").split())
            segments.append((document, match.group("seg"), text))
    if not segments:
        raise PrepareError(f"{path}: no <seg> in it, so not an SGM test set")
    return segments


def read_test_set(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Lines of source and reference; every segment of an SGM file must have its counterpart."""
    if paths[0].suffix != ".sgm":
        lines = parallel_lines(paths, read_lines)
        return [(source.rstrip("\n"), target.rstrip("\n")) for source, target in lines]
    pairs = []
    for one, other in zip_longest(*map(_read_sgm, paths), fillvalue=("no document", "none", "")):
        if one[:2] != other[:2]:
            raise PrepareError(
                f"{paths[0]} has segment {one[1]} of {one[0]} where {paths[1]} has segment "
                f"{other[1]} of {other[0]}"
            )
        pairs.append((one[2], other[2]))
    return pairs


def _drop_reason(source: int, target: int, longest: int, ratio: float) -> str | None:
    """Why a pair of these lengths is dropped, or None."""
    if not source or not target:
        return "a side without pieces"
    if max(source, target) > longest:
        return f"more than {longest} pieces"
    if max(source, target) > ratio * min(source, target):
        return f"length ratio above {ratio:g}"
    return None


_Encoded = Tuple["list[tuple[str, str]]", "Counter[str]", "Counter[str]"]


def _encode_chunk(
    encoder: SentencePieces, lines: Lines, limits: tuple[int, float] | None
) -> _Encoded:
    texts = [[clean(line.decode("utf-8")) for line in side] for side in zip(*lines)]
    kept = []
    counts: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for source, target in zip(*(encoder.encode_all(side) for side in texts)):
        reason = _drop_reason(len(source), len(target), *limits) if limits is not None else None
        counts[reason or "kept"] += 1
        if reason is None:
            kept.append((" ".join(source), " ".join(target)))
            used.update(source)
            used.update(target)
    return kept, counts, used


def encode(
    model: Path,
    lines: Iterable[tuple[bytes, bytes]],
    writer: LineWriter,
    workers: int,
    limits: tuple[int, float] | None = None,
    total: int | None = None,
) -> tuple[Counter[str], Counter[str]]:
    """Write a parallel text as pieces. Limits are the most pieces of a side and the largest ratio
    of two sides; pairs outside them are dropped. Returns counts of kept and dropped pairs by
    reason, and the uses of each piece."""
    counts: Counter[str] = Counter()
    used: Counter[str] = Counter()
    function = partial(_encode_chunk, limits=limits)
    with writer, progress(total, "encode", unit=" pairs") as bar:
        for found in ordered_map(function, chunked(lines), workers, SentencePieces, model):
            for pair in found[0]:
                writer.write(*pair)
            counts.update(found[1])
            used.update(found[2])
            bar.update(sum(found[1].values()))
    return counts, used
