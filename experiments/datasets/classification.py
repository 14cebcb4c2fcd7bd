"""Text classification: documents with a class each, in the layout of fairseq's sentence_prediction.

The sets of Zhang et al. (2015) and your own CSV or TSV files. A part of the training rows is held
out as `valid`, so that no test row chooses a checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Dict, Tuple

from experiments.datasets import PrepareError
from experiments.datasets.binarize import dictionary_size, preprocess_parts, write_dictionary
from experiments.datasets.checksums import hash_file
from experiments.datasets.cli import DataSet, Result, Run, at_least, split_commas
from experiments.datasets.rows import (
    SPLITS,
    Columns,
    Labels,
    Row,
    Split,
    count_columns,
    read_rows,
)
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import chunked, ordered_map
from fairseq_dpq.cli.classify import split_words

Plan = Tuple[Dict[str, Path], Columns, Labels]  # the files of train, perhaps valid and test


def is_held_out(words: str, fraction: float, seed: int) -> bool:
    """Whether a document belongs to `valid`. Equal documents are on the same side."""
    digest = hashlib.blake2b(words.encode("utf-8"), digest_size=8, key=b"%d" % seed).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def _split_rows(rows: list[Row]) -> list[Row]:
    return [row._replace(texts=(" ".join(split_words(" ".join(row.texts))),)) for row in rows]


@dataclass(frozen=True)
class Documents(DataSet):
    """A set of Zhang et al. (2015), train.csv and test.csv, and its documented counts."""

    description: ClassVar[str] = ("{}: download, check, split into words and a held-out part, "
                                  "fairseq-preprocess.")  # fmt: skip
    title: str
    columns: Columns
    classes: str = ""  # those that the files call 1, 2, ...
    documents: dict[str, int] = field(default_factory=dict)
    paper_types: int = 0

    def files(self, run: Run) -> list[RequiredFile]:
        return [required(run.name, f"{split}.csv") for split in ("train", "test")]

    def plan(self, run: Run) -> Plan:
        """What to read."""
        files = {name[:-4]: path for name, path in run.sources.obtain(self.files(run)).items()}
        classes = enumerate(self.classes.split(), start=1)
        return files, self.columns, Labels({str(number): name for number, name in classes})

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--held-out", type=float, default=0.05, metavar="F",
            help="part of the training rows that becomes valid (default: %(default)s)")  # fmt: skip
        add("--seed", type=int, default=1, metavar="N",
            help="chooses which rows are held out (default: %(default)s)")  # fmt: skip
        add("--min-count", type=int, default=1, metavar="N",
            help="leave out words that are rarer in train (default: %(default)s)")  # fmt: skip

    def options(self, run: Run) -> Result:
        args = run.args
        if not 0 < args.held_out < 1:
            raise PrepareError(f"--held-out {args.held_out}: must be between 0 and 1; try 0.05")
        at_least(args, min_count=1)
        return {"held_out": args.held_out, "seed": args.seed, "min_count": args.min_count}

    def build(self, run: Run, folder: Path) -> list[str]:
        text = folder / "scratch"
        files, columns, labels = self.plan(run)
        splits = self._write_text(run, files, columns, labels, text)
        train, least = splits["train"].words, run.args.min_count
        kept = {word: n for word, n in train.items() if n >= least}
        if not kept:
            raise PrepareError(f"{files['train']}: no words in it (--min-count {least})")
        order = sorted(kept, key=lambda word: (-kept[word], word))
        write_dictionary(text / "dict.input0", order, kept)
        classes = list(labels.names.values())
        write_dictionary(text / "dict.label", classes)
        dictionaries = {part: text / f"dict.{part}" for part in splits["train"].parts}
        preprocess_parts(folder, dictionaries, list(splits), run.workers)
        report = []
        for split, found in splits.items():
            unknown = sum(n for word, n in found.words.items() if word not in kept)
            line = f"{split}: {found.rows:,} documents, {found.length:,} words, {unknown:,} unknown"
            empty = f"; {found.empty:,} documents without words" if found.empty else ""
            report.append(line + empty)
        held_out = set() if "valid" in files else splits["valid"].words.keys()
        paper = f" (the paper's table has {self.paper_types:,} rows)" if self.paper_types else ""
        entries = dictionary_size(folder / "input0" / "dict.txt")
        return [
            *report,
            f"{len(classes)} classes: {', '.join(classes[:20])}",
            f"{len(train.keys() | held_out):,} types in the training file{paper}; "
            f"{entries:,} dictionary entries in fairseq",
        ]

    def _write_text(
        self, run: Run, files: dict[str, Path], columns: Columns, labels: Labels, folder: Path
    ) -> dict[str, Split]:
        """Write the words of all splits. Unless a header names them, all files have the columns of
        the training file."""
        if columns.count is None and not columns.by_name:
            columns = replace(columns, count=count_columns(files["train"], columns))
        hold_out, fraction = "valid" not in files, run.args.held_out
        with ExitStack() as stack:
            names = [name for name in SPLITS if name == "valid" or name in files]
            splits = {name: stack.enter_context(Split(folder, name)) for name in names}
            for name, path in files.items():
                for rows in ordered_map(
                    _split_rows, chunked(read_rows(path, columns)), run.workers
                ):
                    for row in rows:
                        held = name == "train" and hold_out
                        held = held and is_held_out(row.texts[0], fraction, run.args.seed)
                        splits["valid" if held else name].add(row.texts, labels.find(row, path))
                if name == "train":
                    labels.close(path)
        for name, split in splits.items():
            if not split.rows:
                raise PrepareError(
                    f"{files['train']}: --held-out {fraction} leaves no rows for {name}"
                )
        for name, documented in self.documents.items():
            count = splits[name].rows + (splits["valid"].rows if name == "train" else 0)
            run.expect(f"{name} documents", count, documented)
        return splits


class CsvFiles(Documents):
    """Your own files; label and text columns by option."""

    description: ClassVar[str] = ("CSV or TSV files with a label and a text in each row: check, "
                                  "split into words and a held-out part, fairseq-preprocess."
                                  )  # fmt: skip
    downloads: ClassVar[bool] = False

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--train", type=Path, required=True, metavar="FILE", help="training rows")
        add("--test", type=Path, metavar="FILE", help="test rows")
        add("--valid", type=Path, metavar="FILE",
            help="validation rows (default: --held-out of train)")  # fmt: skip
        add("--label-column", default="1", metavar="N",
            help="column of the label, counted from 1, or its name with --header "
            "(default: %(default)s)")  # fmt: skip
        add("--text-columns", default="2", metavar="N,N",
            help="columns of the text (default: %(default)s)")  # fmt: skip
        add("--header", action="store_true", help="the first row names the columns")
        add("--tab", action="store_true",
            help="columns are separated by tabs, quotes are plain text")  # fmt: skip
        add("--escaped-newlines", action="store_true",
            help="line breaks are written as backslash and n")  # fmt: skip
        super().add_flags(parser)

    def plan(self, run: Run) -> Plan:
        args = run.args
        files = {split: getattr(args, split) for split in SPLITS if getattr(args, split)}
        for split, path in files.items():
            if not path.is_file():
                raise PrepareError(f"--{split} {path}: no such file")
        texts = tuple(split_commas(args.text_columns))
        if not texts:
            raise PrepareError(f"--text-columns {args.text_columns!r}: name at least one column")
        columns = Columns(
            args.label_column.strip(),
            texts,
            header=args.header,
            tab=args.tab,
            escaped_newlines=args.escaped_newlines,
        )
        return files, columns, Labels(open=True)

    def options(self, run: Run) -> Result:
        flags, (files, columns, _) = super().options(run), self.plan(run)
        return {
            **flags,
            "files": {split: hash_file(path) for split, path in files.items()},
            "columns": [columns.label, *columns.texts],
            "dialect": [columns.header, columns.tab, columns.escaped_newlines],
        }


_REVIEW = Columns("1", ("2",), 2, escaped_newlines=True)
SETS: dict[str, Documents] = {
    "csv_files": CsvFiles("your files", Columns()),
    "ag_news": Documents(
        title="AG News",
        # A lost line break is a bare backslash here, so that "\\new" is the word "new".
        columns=Columns("1", ("2", "3"), 3),
        classes="World Sports Business Sci/Tech",
        documents={"train": 120000, "test": 7600},
        paper_types=69322,
    ),
    "dbpedia": Documents(
        title="DBpedia",
        columns=Columns("1", ("2", "3"), 3),
        classes="Company EducationalInstitution Artist Athlete OfficeHolder MeanOfTransportation "
        "Building NaturalPlace Village Animal Plant Album Film WrittenWork",
        documents={"train": 560000, "test": 70000},
        paper_types=612530,
    ),
    "yahoo_answers": Documents(
        title="Yahoo! Answers",
        columns=Columns("1", ("2", "3", "4"), 4, escaped_newlines=True),
        classes="Society_&_Culture Science_&_Mathematics Health Education_&_Reference "
        "Computers_&_Internet Sports Business_&_Finance Entertainment_&_Music "
        "Family_&_Relationships Politics_&_Government",
        documents={"train": 1400000, "test": 60000},
        paper_types=477522,
    ),
    "yelp_full": Documents(
        title="Yelp Review Full",
        columns=_REVIEW,
        classes="1 2 3 4 5",
        documents={"train": 650000, "test": 50000},
        paper_types=268414,
    ),
    "yelp_polarity": Documents(  # one or two stars, three or four
        title="Yelp Review Polarity",
        columns=_REVIEW,
        classes="negative positive",
        documents={"train": 560000, "test": 38000},
        paper_types=246739,
    ),
}
