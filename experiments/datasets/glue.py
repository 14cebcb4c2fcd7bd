"""Labelled sentences and pairs of GLUE and XNLI: the data of fairseq's task sentence_prediction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from experiments.datasets import pieces
from experiments.datasets.binarize import dictionary_size, preprocess_parts, write_dictionary
from experiments.datasets.cli import Run
from experiments.datasets.rows import SPLITS, Columns, Labels, Row, Split, read_rows
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import chunked, ordered_map


def _encode_rows(encoder: Any, rows: list[Row]) -> list[Row]:
    return [row._replace(texts=tuple(pieces.encode_lines(encoder, row.texts))) for row in rows]


def _columns(label: int, *texts: int, header: bool = True, chinese: bool = False) -> Columns:
    """Quotes are part of the text: GLUE's files have unbalanced ones."""
    names = tuple(str(number) for number in texts)
    only = (1, "zh") if chinese else None
    return Columns(str(label), names, header=header, tab=True, ragged=True, only=only)


@dataclass(frozen=True)
class LabelledSet(pieces.PieceSet):
    """A classification set: the names, documented rows and columns of its files, which are train,
    valid and perhaps test; its labels in fairseq's order."""

    description: ClassVar[str] = "{}: pieces and labels for sentence_prediction."
    title: str
    parts: tuple[tuple[str, int, Columns], ...]
    labels: tuple[str, ...] = ("0", "1")
    spellings: tuple[tuple[str, str], ...] = ()  # other words for the same label

    def files(self, run: Run) -> list[RequiredFile]:
        return [required(run.name, name) for name, _, _ in self.parts]

    def classes(self) -> Labels:
        return Labels({**{name: name for name in self.labels}, **dict(self.spellings)})

    def build(self, run: Run, folder: Path) -> list[str]:
        paths = dict(zip(SPLITS, run.sources.obtain(self.files(run)).values()))
        vocab, scratch = self.start(run, folder), folder / "scratch"
        classes, report = self.classes(), []
        for (split, path), (_, documented, columns) in zip(paths.items(), self.parts):
            with Split(scratch, split, len(columns.texts)) as found:
                for rows in ordered_map(
                    _encode_rows, chunked(read_rows(path, columns)), run.workers,
                    pieces.load, vocab, not run.args.cased,
                ):  # fmt: skip
                    for row in rows:
                        found.add(row.texts, classes.find(row, path))
            run.expect(f"{split} rows", found.rows, documented)
            labels = ", ".join(f"{found.labels[label]:,} {label}" for label in self.labels)
            most = max(found.labels.values()) / found.rows
            mean = f"{found.length / found.rows:.1f} pieces on average"
            report.append(
                f"{split}: {found.rows:,} rows of {mean} ({labels}); "
                f"the most frequent label is right for {100 * most:.1f} %"
            )
        write_dictionary(scratch / "labels.txt", self.labels)
        dictionaries = dict.fromkeys(found.parts, scratch / "dict.txt")
        dictionaries["label"] = scratch / "labels.txt"
        preprocess_parts(folder, dictionaries, list(paths), run.workers)
        rows_of_table = dictionary_size(folder / "input0" / "dict.txt") + 1
        return [*report, f"{rows_of_table:,} rows of the embedding, with <mask>"]


def _train_and_dev(train: int, dev: int, columns: Columns) -> tuple[tuple[str, int, Columns], ...]:
    return ("train.tsv", train, columns), ("dev.tsv", dev, columns)


_ENTAILMENT = ("contradiction", "neutral", "entailment")
SETS = {
    # Is a sentence acceptable English?
    "glue_cola": LabelledSet("CoLA", _train_and_dev(8551, 1043, _columns(2, 4, header=False))),
    # Does the first text entail the second? `test` is the mismatched part of the held-out pairs.
    "glue_mnli": LabelledSet(
        "MNLI",
        (
            ("train.tsv", 392702, _columns(12, 9, 10)),
            ("dev_matched.tsv", 9815, _columns(16, 9, 10)),
            ("dev_mismatched.tsv", 9832, _columns(16, 9, 10)),
        ),
        _ENTAILMENT,
    ),
    # Do two sentences say the same? Its licence forbids GLUE to distribute the split: train.tsv and
    # dev.tsv come from --from.
    "glue_mrpc": LabelledSet("MRPC", _train_and_dev(3668, 408, _columns(1, 4, 5))),
    "glue_rte": LabelledSet(
        "RTE", _train_and_dev(2490, 277, _columns(4, 2, 3)), ("entailment", "not_entailment")
    ),
    # Is a phrase of a film review positive?
    "glue_sst2": LabelledSet("SST-2", _train_and_dev(67349, 872, _columns(2, 1))),
    # MNLI translated for training. BERT's own script reads XNLI in Chinese only, and the paper's
    # results fit that.
    "glue_xnli": LabelledSet(
        "XNLI (Chinese)",
        (
            ("multinli.train.zh.tsv", 392702, _columns(3, 1, 2)),
            ("xnli.dev.tsv", 2490, _columns(2, 7, 8, chinese=True)),
            ("xnli.test.tsv", 5010, _columns(2, 7, 8, chinese=True)),
        ),
        _ENTAILMENT,
        spellings=(("contradictory", "contradiction"),),
    ),
}
