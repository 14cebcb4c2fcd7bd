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
from experiments.datasets.cli import DataSet, Result, Run
from experiments.datasets.sources import RequiredFile, required

SPLITS = ("train", "valid", "test")


def count(path: Path, vocabulary: set[str], grow: bool) -> tuple[int, int, int]:
    """(lines, tokens with end-of-line, tokens outside the vocabulary); `grow` adds them to it."""
    lines = tokens = unknown = 0
    with open(path, encoding="utf-8", newline="\n") as stream:
        try:
            for line in stream:
                words = line.split()
                lines += 1
                tokens += len(words) + 1
                if grow:
                    vocabulary.update(words)
                else:
                    unknown += sum(word not in vocabulary for word in words)
        except UnicodeDecodeError as error:
            raise PrepareError(f"{path}: not UTF-8 text ({error})") from error
    if not lines:
        raise PrepareError(f"{path}: is empty")
    return lines, tokens, unknown


@dataclass(frozen=True)
class TextSet(DataSet):
    """A language-model data set: its files, {} stands for the split, and its documented counts."""

    description: ClassVar[str] = "{}: download, check, fairseq-preprocess."
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
        chosen = [part.strip() for part in text.split(",") if part.strip()]
        if not {"train"} <= set(chosen) <= set(SPLITS):
            raise PrepareError(
                f"--splits {text}: choose from train,valid,test; train gives the dictionary and "
                "must be among them"
            )
        return {"splits": [split for split in SPLITS if split in chosen]}

    def files(self, run: Run) -> list[RequiredFile]:
        found = {split: self._file(run, split) for split in self.options(run)["splits"]}
        missing = [s for s, item in found.items() if run.sources.locate(item) is None]
        if missing:
            names = ", ".join(found[split].name for split in missing)
            message = f"--from {run.args.from_dir}: missing split {','.join(missing)} (no {names})"
            rest = [split for split in found if split not in missing]
            if "train" in rest:
                message += f"; add it, or pass --splits {','.join(rest)} to leave it out"
            raise PrepareError(message)
        return list(found.values())

    def _file(self, run: Run, split: str) -> RequiredFile:
        return required(run.name, self.name.format(split))

    def build(self, run: Run, folder: Path) -> Result:
        splits = self.options(run)["splits"]
        files = run.sources.obtain([self._file(run, split) for split in splits])
        paths = dict(zip(splits, files.values()))
        vocabulary: set[str] = set()
        counts: dict[str, list[int]] = {}
        for split, path in paths.items():
            lines, tokens, unknown = count(path, vocabulary, grow=split == "train")
            run.expect(f"{split} lines", lines, self.lines[split])
            run.expect(f"{split} tokens with end-of-line", tokens, self.tokens[split])
            counts[split] = [lines, tokens, unknown]
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
        return {"counts": counts, "types": types, "dictionary": entries}

    def report(self, result: Result) -> list[str]:
        lines = []
        for split in SPLITS:
            if split in result["counts"]:
                n, tokens, unknown = result["counts"][split]
                words = f"{tokens:,} tokens with end-of-line, {unknown:,} unknown"
                lines.append(f"{split}: {n:,} lines, {words}")
        entries = f"{result['dictionary']:,} dictionary entries in fairseq"
        return [*lines, f"{result['types']:,} types with <unk> and end-of-line; {entries}"]


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
