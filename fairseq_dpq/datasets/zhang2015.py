"""What the classification sets of Zhang et al. (2015) share: archives of train.csv and test.csv.

Two archives of each set exist, with different bytes: fast.ai's and the authors'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping

from fairseq_dpq.datasets import classification
from fairseq_dpq.datasets.checksums import UNKNOWN, Digest
from fairseq_dpq.datasets.classification import Labels, Plan
from fairseq_dpq.datasets.cli import Result, Run, make_parser, run_main
from fairseq_dpq.datasets.download import Remote
from fairseq_dpq.datasets.rows import Columns
from fairseq_dpq.datasets.sources import Route, Wanted

_FAST_AI = "https://s3.amazonaws.com/fast-ai-nlp/{}_csv.tgz"
_DRIVE = "https://drive.google.com/uc?export=download&confirm=t&id={}"


@dataclass(frozen=True)
class ZhangSet:
    """One set: its archives, its columns, its classes and its documented figures."""

    name: str  # of the module and of the folder in data-bin
    title: str
    stem: str  # of the archives: STEM_csv.tgz
    fast_ai: Digest
    drive: str  # the id of the authors' archive
    original: Digest
    columns: Columns
    classes: tuple[str, ...]  # those that the files call 1, 2, ...
    documents: Mapping[str, int]
    paper_types: int
    more: tuple[Remote, ...] = ()  # other archives with the same members
    urls: tuple[str, ...] = ()  # of the files themselves; {} stands for the name
    digests: Mapping[str, Digest] = field(default_factory=dict)

    def wanted(self) -> list[Wanted]:
        """train.csv and test.csv."""
        archives = [
            Remote(f"{self.stem}_csv.tgz", (_FAST_AI.format(self.stem),), self.fast_ai),
            Remote(f"{self.stem}_csv.tar.gz", (_DRIVE.format(self.drive),), self.original),
            *self.more,
        ]
        files = []
        for name in ("train.csv", "test.csv"):
            digest = self.digests.get(name, UNKNOWN)
            routes = [Route(archive, f"{self.stem}_csv/{name}") for archive in archives]
            if self.urls:
                plain = Remote(name, tuple(url.format(name) for url in self.urls), digest)
                routes.insert(0, Route(plain))
            files.append(Wanted(name, tuple(routes), digest))
        return files


def _build(run: Run, data: ZhangSet, flags: Result, folder: Path) -> Result:
    paths = run.sources.obtain(data.wanted())
    files = {split: paths[f"{split}.csv"] for split in ("train", "test")}
    labels = Labels({str(number): name for number, name in enumerate(data.classes, start=1)})
    result = classification.build(run, Plan(files, data.columns, labels, **flags), folder)
    counts = {split: numbers[0] for split, numbers in result["counts"].items()}
    run.expect("train documents", counts["train"] + counts["valid"], data.documents["train"])
    run.expect("test documents", counts["test"], data.documents["test"])
    return result


def main(data: ZhangSet, argv: list[str] | None = None) -> int:
    """Run the prepare script of a set."""
    parser = make_parser(data.name, f"{data.title}: download, check, split into words and a "
                         "held-out part, fairseq-preprocess.")  # fmt: skip
    classification.add_flags(parser)

    def body(run: Run) -> None:
        flags = classification.read_flags(run.args)
        run.publish(
            flags,
            data.wanted(),
            lambda folder: _build(run, data, flags, folder),
            lambda result: classification.report(result, data.paper_types),
        )

    return run_main(data.name, parser, body, argv)
