"""Parallel text: two files with the same number of lines, read in chunks, encoded and written.

A joint SentencePiece model encodes both sides. Its ids 0-3 are fairseq's specials, so piece ids and
dictionary indices are equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence, Tuple

from experiments.datasets import PrepareError
from experiments.datasets.download import progress
from experiments.datasets.pieces import SentencePieces
from experiments.datasets.text import CHUNK, LineWriter, clean, ordered_map

LANGUAGES = ("en", "de")
Lines = Tuple["list[bytes]", "list[bytes]"]


def parallel_chunks(paths: Sequence[Path]) -> Iterator[Lines]:
    """Lines of two parallel files; PrepareError if one of them is longer."""
    done = 0
    # Binary files break lines at LF alone.
    with open(paths[0], "rb") as first, open(paths[1], "rb") as second:
        while True:
            left, right = list(islice(first, CHUNK)), list(islice(second, CHUNK))
            if len(left) != len(right):
                lines = [done + len(left), done + len(right)]
                lines[0] += sum(1 for _ in first)
                lines[1] += sum(1 for _ in second)
                raise PrepareError(
                    f"{paths[0]} has {lines[0]} lines, {paths[1]} has {lines[1]}: not parallel"
                )
            if not left:
                return
            done += len(left)
            yield left, right


@dataclass(frozen=True)
class Limits:
    """Limits on the pieces of a pair; None: no limit, except that no side may be empty."""

    longest: int | None = None
    ratio: float | None = None

    def reason(self, source: int, target: int) -> str | None:
        """Why a pair of these lengths is dropped, or None."""
        if not source or not target:
            return "a side without pieces"
        if self.longest is not None and max(source, target) > self.longest:
            return f"more than {self.longest} pieces"
        if self.ratio is not None and max(source, target) > self.ratio * min(source, target):
            return f"length ratio above {self.ratio:g}"
        return None


_Encoded = Tuple["list[tuple[str, str]]", "Counter[str]", "Counter[str]"]
_encoder: Any = None


def _load(model: str) -> None:
    global _encoder
    _encoder = SentencePieces(Path(model))


def _encode_chunk(task: tuple[Lines, Limits | None]) -> _Encoded:
    lines, limits = task
    texts = [[clean(line.decode("utf-8")) for line in side] for side in lines]
    kept = []
    counts: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for source, target in zip(*(_encoder.encode_all(side) for side in texts)):
        reason = limits.reason(len(source), len(target)) if limits is not None else None
        counts[reason or "kept"] += 1
        if reason is None:
            kept.append((" ".join(source), " ".join(target)))
            used.update(source)
            used.update(target)
    return kept, counts, used


def encode(
    model: Path,
    chunks: Iterable[Lines],
    writer: LineWriter,
    workers: int,
    limits: Limits | None = None,
    total: int | None = None,
) -> tuple[Counter[str], Counter[str]]:
    """Write a parallel text as pieces. With limits, pairs outside them are dropped. Returns counts
    of kept and dropped pairs by reason, and the uses of each piece."""
    counts: Counter[str] = Counter()
    used: Counter[str] = Counter()
    tasks = ((lines, limits) for lines in chunks)
    with writer, progress(total, "encode", unit=" pairs") as bar:
        for found in ordered_map(_encode_chunk, tasks, workers, _load, (str(model),)):
            for pair in found[0]:
                writer.write(*pair)
            counts.update(found[1])
            used.update(found[2])
            bar.update(sum(found[1].values()))
    return counts, used
