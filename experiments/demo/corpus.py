"""Writes the demo's bilingual corpus: train, valid and test files of generated English
and German sentences, the same bytes for the same seed and sizes on every machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Sequence, Tuple

from experiments.demo.grammar import Grammar
from experiments.demo.lexicon import Dice, build_lexicon

SOURCE, TARGET = "en", "de"
SPLITS = ("test", "valid", "train")  # in the order of drawing: train avoids the other two
Pair = Tuple[str, str]


def generate(seed: int, sizes: dict[str, int]) -> dict[str, list[Pair]]:
    """Sentence pairs of each split. No source sentence of test or valid occurs in a later split.
    A larger training set does not change test and valid."""
    for split, size in sizes.items():
        if split not in SPLITS or size < 0:
            raise ValueError(f"sizes[{split!r}] = {size}: needs one of {SPLITS} and at least 0")
    grammar = Grammar(build_lexicon(seed))
    seen: set[str] = set()
    corpus: dict[str, list[Pair]] = {}
    for at, split in enumerate(SPLITS):
        dice = Dice(1_000_003 * (seed + 1) + at)  # each split has its own sequence
        pairs: list[Pair] = []
        while len(pairs) < sizes.get(split, 0):
            source, target = grammar.pair(dice)
            if source not in seen:
                pairs.append((source, target))
        seen.update(source for source, _ in pairs)
        corpus[split] = pairs
    return corpus


def _write(path: Path, lines: Sequence[str]) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8", newline="\n") as out:
        out.writelines(line + "\n" for line in lines)
    os.replace(part, path)


def write_corpus(out: Path, seed: int, sizes: dict[str, int]) -> dict[str, list[Pair]]:
    """Generate the corpus and write ``<split>.en`` and ``<split>.de`` into ``out``."""
    corpus = generate(seed, sizes)
    out.mkdir(parents=True, exist_ok=True)
    for split, pairs in corpus.items():
        _write(out / f"{split}.{SOURCE}", [source for source, _ in pairs])
        _write(out / f"{split}.{TARGET}", [target for _, target in pairs])
    return corpus


def _summary(split: str, pairs: Sequence[Pair]) -> str:
    parts = []
    for side, language in enumerate((SOURCE, TARGET)):
        words = [word for pair in pairs for word in pair[side].split()]
        parts.append(f"{language} {len(words):,} words, {len(set(words)):,} types")
    return f"{split}: {len(pairs):,} sentences; " + "; ".join(parts)


def _size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text}: needs at least 1 sentence")
    return size


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: ``python -m experiments.demo.corpus OUT --seed 1 --train 12000``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the files")
    parser.add_argument("--seed", type=int, default=1, help="lexicon and sentences (default 1)")
    for split, default in (("train", 12000), ("valid", 500), ("test", 500)):
        parser.add_argument(
            f"--{split}", type=_size, default=default, help=f"sentences (default {default})"
        )
    args = parser.parse_args(argv)
    sizes = {split: getattr(args, split) for split in SPLITS}
    for split, pairs in write_corpus(args.out, args.seed, sizes).items():
        print(_summary(split, pairs))


if __name__ == "__main__":
    main()
