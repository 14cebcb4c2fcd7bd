"""Labelled sentences and pairs of GLUE and XNLI as the data of fairseq's task sentence_prediction.

What the sets share; glue_cola.py and the others describe their files.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, Sequence

from fairseq_dpq.datasets import pieces
from fairseq_dpq.datasets.binarize import dictionary_size, preprocess, write_dictionary
from fairseq_dpq.datasets.cli import Result, Run
from fairseq_dpq.datasets.download import Remote
from fairseq_dpq.datasets.errors import PrepareError
from fairseq_dpq.datasets.sources import Route, Wanted
from fairseq_dpq.datasets.text import CHUNK


@dataclass(frozen=True)
class Columns:
    """Where a TSV file has its fields, counted from 0; `only` is a column and its value."""

    sentences: tuple[int, ...]
    label: int
    header: bool = True
    only: tuple[int, str] | None = None


@dataclass(frozen=True)
class LabelledSet:
    """A classification set: its files by split, their columns, its labels in fairseq's order."""

    name: str
    title: str
    files: dict[str, Wanted]
    columns: dict[str, Columns]
    labels: tuple[str, ...]
    rows: dict[str, int]
    spellings: dict[str, str] = field(default_factory=dict)  # other words for the same label


def tsv(archive: str, urls: tuple[str, ...], member: str) -> Wanted:
    """A TSV file of an archive; --from may have the archive, its folder or the file."""
    return Wanted(member.rsplit("/", 1)[-1], (Route(Remote(archive, urls), member),))


def glue_files(folder: str, splits: dict[str, str]) -> dict[str, Wanted]:
    """The files of a GLUE archive, by fairseq's names of the splits."""
    urls = (f"https://dl.fbaipublicfiles.com/glue/data/{folder}.zip",)
    return {
        split: tsv(f"{folder}.zip", urls, f"{folder}/{file}.tsv") for split, file in splits.items()
    }


@dataclass(frozen=True)
class Row:
    """One example: its sentence or its two sentences, and its label."""

    sentences: tuple[str, ...]
    label: str


def read_rows(path: Path, data: LabelledSet, columns: Columns) -> Iterator[Row]:
    """The examples of a TSV file.

    Quotes are part of the text: GLUE's files have unbalanced ones. Lines end at LF alone. A byte
    order mark, which MRPC has, is in the header.
    """
    wanted = [*columns.sentences, columns.label, *([columns.only[0]] if columns.only else [])]
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise PrepareError(f"{path}: line {number}: not UTF-8 text ({error})") from error
            if number == 1 and columns.header:
                continue
            cells = line.split("\t")
            if len(cells) <= max(wanted):
                raise PrepareError(
                    f"{path}: line {number} has {len(cells)} columns, expected at least "
                    f"{max(wanted) + 1}, separated by tabs"
                )
            if columns.only and cells[columns.only[0]] != columns.only[1]:
                continue
            label = data.spellings.get(cells[columns.label], cells[columns.label])
            if label not in data.labels:
                raise PrepareError(
                    f"{path}: line {number}: label {cells[columns.label]!r} is not one of "
                    f"{', '.join(data.labels)}"
                )
            yield Row(tuple(cells[i] for i in columns.sentences), label)


def _chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), CHUNK):
        yield list(texts[start : start + CHUNK])


def _write(path: Path, lines: Sequence[str]) -> None:
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8"))


def _build(run: Run, data: LabelledSet, vocab: Path, folder: Path) -> Result:
    lower = not run.args.cased
    encoder = pieces.load(vocab, lower)
    paths = run.sources.obtain(list(data.files.values()))
    pieces.keep(vocab, folder)
    scratch = folder / "scratch"
    scratch.mkdir()
    pieces.write_dict(encoder, scratch / "dict.txt")
    write_dictionary(scratch / "labels.txt", data.labels)
    sides = len(data.columns["train"].sentences)
    counts: Result = {}
    for split, wanted in data.files.items():
        path = paths[wanted.name]
        rows = list(read_rows(path, data, data.columns[split]))
        if not rows:
            raise PrepareError(f"{path}: no rows in it")
        run.expect(f"{split} rows", len(rows), data.rows[split])
        _write(scratch / f"{split}.label", [row.label for row in rows])
        length = 0
        for side in range(sides):
            texts = [row.sentences[side] for row in rows]
            chunks = pieces.encode_chunks(vocab, lower, _chunks(texts), run.workers)
            lines = [line for chunk in chunks for line in chunk]
            _write(scratch / f"{split}.input{side}", lines)
            length += sum(len(line.split()) for line in lines)
        share = {label: sum(row.label == label for row in rows) for label in data.labels}
        counts[split] = {"rows": len(rows), "pieces": length, "labels": share}
    parts = [*(f"input{side}" for side in range(sides)), "label"]
    for part in parts:
        run.say(f"fairseq-preprocess: {part}")
        dictionary = "labels.txt" if part == "label" else "dict.txt"
        arguments = ["--only-source", "--srcdict", str(scratch / dictionary)]
        for split in data.files:
            arguments += [f"--{split}pref", str(scratch / f"{split}.{part}")]
        preprocess(folder / part, arguments, run.workers)
    shutil.rmtree(scratch)
    entries = dictionary_size(folder / "input0" / "dict.txt")
    return {"counts": counts, "dictionary": entries, "sides": sides}


def _report(result: Result) -> list[str]:
    lines = []
    for split, counts in result["counts"].items():
        most = max(counts["labels"].values()) / counts["rows"]
        mean = counts["pieces"] / counts["rows"]
        labels = ", ".join(f"{n:,} {label}" for label, n in counts["labels"].items())
        lines.append(
            f"{split}: {counts['rows']:,} rows of {mean:.1f} pieces on average ({labels}); "
            f"the most frequent label is right for {100 * most:.1f} %"
        )
    return [*lines, f"{result['dictionary'] + 1:,} rows of the embedding, with <mask>"]


def main(data: LabelledSet, argv: list[str] | None = None) -> int:
    """Run the prepare script of a labelled set."""
    description = f"{data.title}: pieces and labels for sentence_prediction."

    def build(run: Run, vocab: Path, folder: Path) -> Result:
        return _build(run, data, vocab, folder)

    return pieces.run_set(data.name, description, data.files, build, _report, argv)
