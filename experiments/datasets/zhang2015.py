"""The text classification sets of Zhang et al. (2015): archives of train.csv and test.csv.

Two archives of each set exist, with different bytes: fast.ai's and the authors'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from experiments.datasets import classification
from experiments.datasets.classification import Labels, Plan
from experiments.datasets.cli import Result, Run, make_parser, run_main
from experiments.datasets.rows import Columns
from experiments.datasets.sources import RequiredFile, remote, required

_FAST_AI = "https://s3.amazonaws.com/fast-ai-nlp/{}"
_DRIVE = "https://drive.google.com/uc?export=download&confirm=t&id="
_REVIEW = Columns("1", ("2",), 2, escaped_newlines=True)


@dataclass(frozen=True)
class ZhangSet:
    """One set: its archives, its columns, its classes and its documented counts."""

    title: str
    stem: str  # of the archives: STEM_csv.tgz
    drive: str  # the id of the authors' archive
    columns: Columns
    classes: tuple[str, ...]  # those that the files call 1, 2, ...
    documents: Mapping[str, int]
    paper_types: int
    more: tuple[tuple[str, str], ...] = ()  # other archives: their names and addresses
    urls: tuple[str, ...] = ()  # of the files themselves

    def files(self, name: str) -> list[RequiredFile]:
        """train.csv and test.csv."""
        archives = [
            remote(name, f"{self.stem}_csv.tgz", _FAST_AI),
            remote(name, f"{self.stem}_csv.tar.gz", _DRIVE + self.drive),
            *(remote(name, *other) for other in self.more),
        ]
        return [
            required(name, file, self.urls, [(a, f"{self.stem}_csv/{file}") for a in archives])
            for file in ("train.csv", "test.csv")
        ]


SETS = {
    "ag_news": ZhangSet(
        title="AG News",
        stem="ag_news",
        drive="0Bz8a_Dbh9QhbUDNpeUdjb0wxRms",
        # A lost line break is a bare backslash here, so that "\\new" is the word "new".
        columns=Columns("1", ("2", "3"), 3),
        classes=("World", "Sports", "Business", "Sci/Tech"),
        documents={"train": 120000, "test": 7600},
        paper_types=69322,
        urls=(
            "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/{}",
        ),
    ),
    "dbpedia": ZhangSet(
        title="DBpedia",
        stem="dbpedia",
        drive="0Bz8a_Dbh9QhbQ2Vic1kxMmZZQ1k",
        columns=Columns("1", ("2", "3"), 3),
        classes=(
            *("Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder"),
            *("MeanOfTransportation", "Building", "NaturalPlace", "Village", "Animal"),
            *("Plant", "Album", "Film", "WrittenWork"),
        ),
        documents={"train": 560000, "test": 70000},
        paper_types=612530,
        more=(
            (
                "dbpedia_csv.torchDatasets.tar.gz",
                "https://github.com/srhrshr/torchDatasets/raw/master/dbpedia_csv.tar.gz",
            ),
        ),
    ),
    "yahoo_answers": ZhangSet(
        title="Yahoo! Answers",
        stem="yahoo_answers",
        drive="0Bz8a_Dbh9Qhbd2JNdDBsQUdocVU",
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
        stem="yelp_review_full",
        drive="0Bz8a_Dbh9QhbZlU4dXhHTFhZQU0",
        columns=_REVIEW,
        classes=("1", "2", "3", "4", "5"),
        documents={"train": 650000, "test": 50000},
        paper_types=268414,
    ),
    "yelp_polarity": ZhangSet(  # one or two stars, three or four
        title="Yelp Review Polarity",
        stem="yelp_review_polarity",
        drive="0Bz8a_Dbh9QhbNUpYQ2N3SGlFaDg",
        columns=_REVIEW,
        classes=("negative", "positive"),
        documents={"train": 560000, "test": 38000},
        paper_types=246739,
    ),
}


def _build(run: Run, data: ZhangSet, flags: Result, folder: Path) -> Result:
    paths = run.sources.obtain(data.files(run.name))
    files = {split: paths[f"{split}.csv"] for split in ("train", "test")}
    labels = Labels({str(number): name for number, name in enumerate(data.classes, start=1)})
    result = classification.build(run, Plan(files, data.columns, labels, **flags), folder)
    counts = {split: numbers[0] for split, numbers in result["counts"].items()}
    run.expect("train documents", counts["train"] + counts["valid"], data.documents["train"])
    run.expect("test documents", counts["test"], data.documents["test"])
    return result


def main(name: str, argv: list[str] | None = None) -> int:
    """Prepare one of the sets; the exit code."""
    data = SETS[name]
    parser = make_parser(name, f"{data.title}: download, check, split into words and a "
                         "held-out part, fairseq-preprocess.")  # fmt: skip
    classification.add_flags(parser)

    def body(run: Run) -> None:
        flags = classification.read_flags(run.args)
        run.publish(
            flags,
            data.files(name),
            lambda folder: _build(run, data, flags, folder),
            lambda result: classification.report(result, data.paper_types),
        )

    return run_main(name, parser, body, argv)
