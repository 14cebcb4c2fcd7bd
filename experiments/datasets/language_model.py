"""Text of language models, Penn Treebank and WikiText-2: three files each.

The vocabulary is closed and every line ends in one end-of-line token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from experiments.datasets import PrepareError
from experiments.datasets.binarize import dictionary_size, preprocess
from experiments.datasets.cli import DataSet, Result, Run, split_commas
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import read_lines

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class TextSet(DataSet):
    """A language-model data set: its files, {} stands for the split, and its documented counts."""

    description: ClassVar[str] = "{}: download, check, fairseq-preprocess."
    optional: ClassVar[str] = "--splits"
    title: str
    name: str
    lines: dict[str, int]
    tokens: dict[str, int]  # with one end-of-line per line
    types: int  # with <unk> and end-of-line

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--splits", default=",".join(SPLITS), metavar="A,B",
                            help="splits to binarise (default: %(default)s)")  # fmt: skip

    def options(self, run: Run) -> Result:
        text = run.args.splits
        chosen = split_commas(text)
        if not {"train"} <= set(chosen) <= set(SPLITS):
            raise PrepareError(
                f"--splits {text}: choose from train,valid,test; train gives the dictionary and "
                "must be among them"
            )
        return {"splits": [split for split in SPLITS if split in chosen]}

    def files(self, run: Run) -> list[RequiredFile]:
        splits = self.options(run)["splits"]
        return [required(run.name, self.name.format(split)) for split in splits]

    def build(self, run: Run, folder: Path) -> list[str]:
        splits = self.options(run)["splits"]
        paths = dict(zip(splits, run.sources.obtain(self.files(run)).values()))
        vocabulary: set[str] = set()
        report = []
        for split, path in paths.items():
            lines = tokens = unknown = 0
            for line in read_lines(path):
                words = line.split()
                lines += 1
                tokens += len(words) + 1
                if split == "train":
                    vocabulary.update(words)
                unknown += sum(word not in vocabulary for word in words)
            run.expect(f"{split} lines", lines, self.lines[split])
            run.expect(f"{split} tokens with end-of-line", tokens, self.tokens[split])
            found = f"{tokens:,} tokens with end-of-line, {unknown:,} unknown"
            report.append(f"{split}: {lines:,} lines, {found}")
        # Types as the papers count them: words, <unk> and end-of-line.
        types = len(vocabulary | {"<unk>"}) + 1
        run.expect("types with <unk> and end-of-line", types, self.types)
        run.say(f"fairseq-preprocess: {', '.join(splits)}")
        arguments = ["--only-source", "--padding-factor", "1"]
        for split, path in paths.items():
            arguments += [f"--{split}pref", str(path)]
        preprocess(folder, arguments, run.workers)
        entries = dictionary_size(folder / "dict.txt")
        if entries != types + 2:  # the paper does not count fairseq's <s> and <pad>
            raise PrepareError(f"{folder / 'dict.txt'}: {entries} entries, expected {types + 2}")
        entries_line = f"{entries:,} dictionary entries in fairseq"
        return [*report, f"{types:,} types with <unk> and end-of-line; {entries_line}"]


SETS = {
    "ptb": TextSet(
        title="Penn Treebank (Mikolov)",
        name="ptb.{}.txt",
        lines={"train": 42068, "valid": 3370, "test": 3761},
        tokens={"train": 929589, "valid": 73760, "test": 82430},
        types=10000,
    ),
    "wikitext2": TextSet(
        title="WikiText-2 (word level, v1)",
        name="wiki.{}.tokens",
        lines={"train": 36718, "valid": 3760, "test": 4358},
        tokens={"train": 2088628, "valid": 217646, "test": 245569},
        types=33278,
    ),
}
