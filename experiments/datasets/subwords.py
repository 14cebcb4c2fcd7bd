"""SentencePiece: a joint model that is the same in every run, and encoding on all cores.

Ids 0-3 are fairseq's specials, so piece ids and dictionary indices are equal.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator

import sentencepiece as spm

from experiments.datasets.binarize import write_dictionary
from experiments.datasets.errors import PrepareError
from experiments.datasets.text import clean, ordered_map, worker_pool


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


def _lines(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as stream:
            for line in stream:
                yield line.rstrip("\n")


def _train(paths: list[Path], size: int, kind: str, coverage: float) -> bytes:
    model = io.BytesIO()
    # Text and model are passed in memory: file names would be written into the model, so two
    # runs in different folders would differ.
    spm.SentencePieceTrainer.train(
        sentence_iterator=_lines(paths),
        model_writer=model,
        vocab_size=size,
        model_type=kind,
        character_coverage=coverage,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        shuffle_input_sentence=False,
        num_threads=16,  # changes the result of "unigram", so not the number of cores
        minloglevel=2,
    )
    return model.getvalue()


def train(
    paths: list[Path],
    model: Path,
    size: int,
    kind: str,
    coverage: float,
    flag: str = "--vocab-size",
) -> None:
    """Train a model of exactly `size` pieces (the four specials among them) and write it; `flag`
    is the one that gave the size."""
    if size < 16:
        raise PrepareError(f"{flag} {size}: must be at least 16")
    # In its own process, so that its memory is freed before the next step.
    with worker_pool(1) as pool:
        try:
            data = pool.submit(_train, paths, size, kind, coverage).result()
        except (RuntimeError, OSError) as error:
            said = str(error).rsplit("] ", 1)[-1]  # without the source location
            raise PrepareError(f"{flag} {size}: SentencePiece says: {said}") from error
    processor = spm.SentencePieceProcessor(model_proto=data)
    if processor.get_piece_size() != size:
        raise PrepareError(
            f"{flag} {size}: the text gives only {processor.get_piece_size()} pieces"
        )
    model.write_bytes(data)


def export_dictionary(model: Path, path: Path) -> int:
    """Write the model's pieces as a fairseq dictionary; returns its size once loaded."""
    processor = spm.SentencePieceProcessor(model_file=str(model))
    size = processor.get_piece_size()
    write_dictionary(path, [processor.id_to_piece(i) for i in range(4, size)])
    return int(size)


_processor: Any = None


def _load(model: str) -> None:
    global _processor
    _processor = spm.SentencePieceProcessor(model_file=model)


def _encode_chunk(
    task: tuple[list[bytes], list[bytes], Limits | None],
) -> tuple[list[str], list[str], Counter[str]]:
    """Encode one chunk; with limits, pairs outside them are dropped and counted by reason."""
    sources, targets, limits = task
    sides = []
    for lines in (sources, targets):
        texts = [clean(line.decode("utf-8")) for line in lines]
        sides.append(_processor.encode(texts, out_type=str, num_threads=1))
    kept: tuple[list[str], list[str]] = ([], [])
    counts: Counter[str] = Counter()
    for source, target in zip(*sides):
        reason = limits.reason(len(source), len(target)) if limits is not None else None
        if reason is not None:
            counts[reason] += 1
            continue
        counts["kept"] += 1
        kept[0].append(" ".join(source) + "\n")
        kept[1].append(" ".join(target) + "\n")
    return kept[0], kept[1], counts


def encode(
    model: Path,
    chunks: Iterable[tuple[list[bytes], list[bytes]]],
    limits: Limits | None,
    workers: int,
) -> Iterator[tuple[list[str], list[str], Counter[str]]]:
    """Encoded chunks of a parallel text in order, with counts of kept and dropped pairs."""
    tasks = ((left, right, limits) for left, right in chunks)
    yield from ordered_map(_encode_chunk, tasks, workers, _load, (str(model),))
