"""Labelled sentences and pairs of GLUE and XNLI: the data of fairseq's task sentence_prediction."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Iterator, Sequence

from experiments.datasets import pieces
from experiments.datasets.binarize import dictionary_size, preprocess_parts, write_dictionary
from experiments.datasets.cli import Result, Run
from experiments.datasets.errors import PrepareError
from experiments.datasets.sources import RequiredFile, remote, required
from experiments.datasets.text import CHUNK


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

    title: str
    files: dict[str, RequiredFile]
    columns: dict[str, Columns]
    labels: tuple[str, ...]
    rows: dict[str, int]
    spellings: dict[str, str] = field(default_factory=dict)  # other words for the same label


def _member(archive: str, urls: tuple[str, ...], member: str) -> RequiredFile:
    """A TSV file of an archive; --from may have the archive, its folder or the file."""
    packed = remote("glue", archive, *urls)
    return required("glue", member.rsplit("/", 1)[-1], archives=[(packed, member)])


def _glue(
    title: str,
    rows: tuple[int, ...],
    columns: Columns,
    labels: tuple[str, ...] = ("0", "1"),
    held_out: Columns | None = None,
    splits: tuple[str, ...] = ("train", "dev"),
) -> LabelledSet:
    """A set of GLUE, whose archive and folder have its title; `held_out` columns differ in some."""
    url = "https://dl.fbaipublicfiles.com/glue/data/{}"
    names = ("train", "valid", "test")[: len(splits)]
    return LabelledSet(
        title,
        {n: _member(f"{title}.zip", (url,), f"{title}/{s}.tsv") for n, s in zip(names, splits)},
        {name: columns if name == "train" else held_out or columns for name in names},
        labels,
        dict(zip(names, rows)),
    )


def _xnli(part: str, member: str) -> RequiredFile:
    hosts = (
        "https://dl.fbaipublicfiles.com/XNLI/{}",
        "https://www.nyu.edu/projects/bowman/xnli/{}",
    )
    return _member(f"{part}.zip", hosts, f"{part}/{member}")


_ENTAILMENT = ("contradiction", "neutral", "entailment")
_CHINESE = Columns(sentences=(6, 7), label=1, only=(0, "zh"))
SETS = {
    # Is a sentence acceptable English?
    "glue_cola": _glue("CoLA", (8551, 1043), Columns((3,), 1, header=False)),
    # Does the first text entail the second? `test` is the mismatched part of the held-out pairs.
    "glue_mnli": _glue(
        "MNLI",
        (392702, 9815, 9832),
        Columns((8, 9), 11),
        _ENTAILMENT,
        held_out=Columns((8, 9), 15),
        splits=("train", "dev_matched", "dev_mismatched"),
    ),
    # Do two sentences say the same? Its licence forbids GLUE to distribute the split: train.tsv and
    # dev.tsv come from --from.
    "glue_mrpc": _glue("MRPC", (3668, 408), Columns((3, 4), 0)),
    "glue_rte": _glue("RTE", (2490, 277), Columns((1, 2), 3), ("entailment", "not_entailment")),
    # Is a phrase of a film review positive?
    "glue_sst2": _glue("SST-2", (67349, 872), Columns((0,), 1)),
    # MNLI translated for training. BERT's own script reads XNLI in Chinese only, and the paper's
    # results fit that.
    "glue_xnli": LabelledSet(
        title="XNLI (Chinese)",
        files={
            "train": _xnli("XNLI-MT-1.0", "multinli/multinli.train.zh.tsv"),
            "valid": _xnli("XNLI-1.0", "xnli.dev.tsv"),
            "test": _xnli("XNLI-1.0", "xnli.test.tsv"),
        },
        columns={"train": Columns((0, 1), 2), "valid": _CHINESE, "test": _CHINESE},
        labels=_ENTAILMENT,
        rows={"train": 392702, "valid": 2490, "test": 5010},
        spellings={"contradictory": "contradiction"},
    ),
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


def _build(data: LabelledSet, run: Run, vocab: Path, folder: Path) -> Result:
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
    dictionaries = {f"input{side}": scratch / "dict.txt" for side in range(sides)}
    dictionaries["label"] = scratch / "labels.txt"
    preprocess_parts(folder, scratch, dictionaries, list(data.files), run.workers)
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


def main(name: str, argv: list[str] | None = None) -> int:
    """Prepare one of the sets; the exit code."""
    data = SETS[name]
    description = f"{data.title}: pieces and labels for sentence_prediction."
    return pieces.run_set(name, description, data.files, partial(_build, data), _report, argv)
