"""Text classification: documents with a class each, in the layout of fairseq's sentence_prediction.

The sets of Zhang et al. (2015) and your own CSV or TSV files. A part of the training rows is held
out as `valid`, so that no test row chooses a checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar, Iterable, Iterator, Sequence

from experiments.datasets import PrepareError
from experiments.datasets.binarize import dictionary_size, preprocess_parts
from experiments.datasets.checksums import hash_file
from experiments.datasets.cli import DataSet, Result, Run
from experiments.datasets.rows import Columns, Labels, Row, count_columns, read_rows
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import CHUNK, ordered_map
from fairseq_dpq.cli.classify import split_words

PARTS = ("input0", "label")  # words and classes
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Plan:
    """What to read and how to split it."""

    files: dict[str, Path]  # train, perhaps valid and test
    columns: Columns
    labels: Labels
    held_out: float
    seed: int
    min_count: int

    @property
    def splits(self) -> list[str]:
        return [split for split in SPLITS if split == "valid" or split in self.files]


def is_held_out(words: str, fraction: float, seed: int) -> bool:
    """Whether a document belongs to `valid`. Equal documents are on the same side."""
    digest = hashlib.blake2b(words.encode("utf-8"), digest_size=8, key=b"%d" % seed).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def _split_all(rows: Sequence[Row]) -> list[list[str]]:
    return [split_words(" ".join(row.texts)) for row in rows]


def _documents(path: Path, columns: Columns, workers: int) -> Iterator[tuple[Row, list[str]]]:
    """The rows of a file with their words, which several processes split."""
    waiting: list[list[Row]] = []

    def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
        stream = iter(rows)
        for chunk in iter(lambda: list(islice(stream, CHUNK)), []):
            waiting.append(chunk)
            yield chunk

    for words in ordered_map(_split_all, chunks(read_rows(path, columns)), workers):
        yield from zip(waiting.pop(0), words)


class _Writer:
    """The text of a split, one document and one label per line, and its words."""

    def __init__(self, folder: Path, split: str, stack: ExitStack) -> None:
        self.documents = self.empty = 0
        self.words: Counter[str] = Counter()
        paths = [folder / f"{split}.{part}" for part in PARTS]
        self._text, self._labels = (stack.enter_context(path.open("wb")) for path in paths)

    def add(self, words: list[str], label: str) -> None:
        self.documents += 1
        self.empty += not words
        self.words.update(words)
        self._text.write((" ".join(words) + "\n").encode("utf-8"))
        self._labels.write((label + "\n").encode("utf-8"))


def _write_text(plan: Plan, folder: Path, workers: int) -> dict[str, _Writer]:
    """Write the text of all splits. Unless a header names them, all files have the columns of the
    training file."""
    columns = plan.columns
    if columns.count is None and not columns.by_name:
        columns = replace(columns, count=count_columns(plan.files["train"], columns))
    with ExitStack() as stack:
        writers = {split: _Writer(folder, split, stack) for split in plan.splits}
        for split, path in plan.files.items():
            for row, words in _documents(path, columns, workers):
                place = split
                if split == "train" and "valid" not in plan.files:
                    held_out = is_held_out(" ".join(words), plan.held_out, plan.seed)
                    place = "valid" if held_out else "train"
                writers[place].add(words, plan.labels.find(row.label, path, row.line))
            if split == "train":
                plan.labels.close(path)
    for split in plan.splits:
        if not writers[split].documents:
            raise PrepareError(
                f"{plan.files['train']}: --held-out {plan.held_out} leaves no rows for {split}"
            )
    return writers


def _write_dictionaries(plan: Plan, folder: Path, words: Counter[str]) -> set[str]:
    """Write dict.input0 and dict.label; the words of the first one."""
    kept = [(word, count) for word, count in words.items() if count >= plan.min_count]
    if not kept:
        raise PrepareError(f"{plan.files['train']}: no words in it (--min-count {plan.min_count})")
    kept.sort(key=lambda item: (-item[1], item[0]))
    entries = [kept, [(name, 1) for name in plan.labels.in_order()]]
    for part, lines in zip(PARTS, entries):
        text = "".join(f"{word} {count}\n" for word, count in lines)
        (folder / f"dict.{part}").write_bytes(text.encode("utf-8"))
    return {word for word, _ in kept}


class Documents(DataSet):
    """A text classification set."""

    paper_types: int | None

    def plan(self, run: Run) -> Plan:
        """What to read."""
        raise NotImplementedError

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
        if args.min_count < 1:
            raise PrepareError(f"--min-count {args.min_count}: must be at least 1")
        return {"held_out": args.held_out, "seed": args.seed, "min_count": args.min_count}

    def build(self, run: Run, folder: Path) -> Result:
        plan, text = self.plan(run), folder / "scratch"
        writers = _write_text(plan, text, run.workers)
        known = _write_dictionaries(plan, text, writers["train"].words)
        types = set(writers["train"].words)
        if "valid" not in plan.files:
            types |= writers["valid"].words.keys()
        dictionaries = {part: text / f"dict.{part}" for part in PARTS}
        preprocess_parts(folder, dictionaries, plan.splits, run.workers)
        counts = {
            split: [
                writer.documents,
                sum(writer.words.values()),
                sum(count for word, count in writer.words.items() if word not in known),
                writer.empty,
            ]
            for split, writer in writers.items()
        }
        return {
            "counts": counts,
            "types": len(types),
            "dictionary": dictionary_size(folder / "input0" / "dict.txt"),
            "classes": plan.labels.in_order(),
        }

    def report(self, result: Result) -> list[str]:
        lines = []
        for split in SPLITS:
            if split in result["counts"]:
                documents, words, unknown, empty = result["counts"][split]
                line = f"{split}: {documents:,} documents, {words:,} words, {unknown:,} unknown"
                lines.append(line + (f"; {empty:,} documents without words" if empty else ""))
        classes = ", ".join(result["classes"][:20])
        paper = f" (the paper's table has {self.paper_types:,} rows)" if self.paper_types else ""
        return [
            *lines,
            f"{len(result['classes'])} classes: {classes}",
            f"{result['types']:,} types in the training file{paper}; "
            f"{result['dictionary']:,} dictionary entries in fairseq",
        ]


class CsvFiles(Documents):
    """Your own files; label and text columns by option."""

    description = ("CSV or TSV files with a label and a text in each row: check, split into words "
                   "and a held-out part, fairseq-preprocess.")  # fmt: skip
    title = "your files"
    downloads = False
    paper_types = None

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
        texts = tuple(part.strip() for part in args.text_columns.split(",") if part.strip())
        if not texts:
            raise PrepareError(f"--text-columns {args.text_columns!r}: name at least one column")
        columns = Columns(
            args.label_column.strip(),
            texts,
            header=args.header,
            tab=args.tab,
            escaped_newlines=args.escaped_newlines,
        )
        labels = Labels(listed=False, open=True)
        return Plan(files, columns, labels, args.held_out, args.seed, args.min_count)

    def options(self, run: Run) -> Result:
        flags, plan = super().options(run), self.plan(run)
        columns = plan.columns
        return {
            **flags,
            "files": {split: hash_file(path) for split, path in plan.files.items()},
            "columns": [columns.label, *columns.texts],
            "dialect": [columns.header, columns.tab, columns.escaped_newlines],
        }


@dataclass(frozen=True)
class ZhangSet(Documents):
    """A set of Zhang et al. (2015), train.csv and test.csv, and its documented counts."""

    description: ClassVar[str] = ("{}: download, check, split into words and a held-out part, "
                                  "fairseq-preprocess.")  # fmt: skip
    title: str
    columns: Columns
    classes: tuple[str, ...]  # those that the files call 1, 2, ...
    documents: dict[str, int]
    paper_types: int

    def files(self, run: Run) -> list[RequiredFile]:
        return [required(run.name, f"{split}.csv") for split in ("train", "test")]

    def plan(self, run: Run) -> Plan:
        files = {name[:-4]: path for name, path in run.sources.obtain(self.files(run)).items()}
        labels = Labels({str(number): name for number, name in enumerate(self.classes, start=1)})
        return Plan(files, self.columns, labels, **self.options(run))

    def build(self, run: Run, folder: Path) -> Result:
        result = super().build(run, folder)
        counts = {split: numbers[0] for split, numbers in result["counts"].items()}
        run.expect("train documents", counts["train"] + counts["valid"], self.documents["train"])
        run.expect("test documents", counts["test"], self.documents["test"])
        return result


_REVIEW = Columns("1", ("2",), 2, escaped_newlines=True)
SETS: dict[str, DataSet] = {
    "csv_files": CsvFiles(),
    "ag_news": ZhangSet(
        title="AG News",
        # A lost line break is a bare backslash here, so that "\\new" is the word "new".
        columns=Columns("1", ("2", "3"), 3),
        classes=("World", "Sports", "Business", "Sci/Tech"),
        documents={"train": 120000, "test": 7600},
        paper_types=69322,
    ),
    "dbpedia": ZhangSet(
        title="DBpedia",
        columns=Columns("1", ("2", "3"), 3),
        classes=(
            *("Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder"),
            *("MeanOfTransportation", "Building", "NaturalPlace", "Village", "Animal"),
            *("Plant", "Album", "Film", "WrittenWork"),
        ),
        documents={"train": 560000, "test": 70000},
        paper_types=612530,
    ),
    "yahoo_answers": ZhangSet(
        title="Yahoo! Answers",
        columns=Columns("1", ("2", "3", "4"), 4, escaped_newlines=True),
        classes=(
            *("Society_&_Culture", "Science_&_Mathematics", "Health", "Education_&_Reference"),
            *("Computers_&_Internet", "Sports", "Business_&_Finance", "Entertainment_&_Music"),
            *("Family_&_Relationships", "Politics_&_Government"),
        ),
        documents={"train": 1400000, "test": 60000},
        paper_types=477522,
    ),
    "yelp_full": ZhangSet(
        title="Yelp Review Full",
        columns=_REVIEW,
        classes=("1", "2", "3", "4", "5"),
        documents={"train": 650000, "test": 50000},
        paper_types=268414,
    ),
    "yelp_polarity": ZhangSet(  # one or two stars, three or four
        title="Yelp Review Polarity",
        columns=_REVIEW,
        classes=("negative", "positive"),
        documents={"train": 560000, "test": 38000},
        paper_types=246739,
    ),
}
