"""Writes the demo's bilingual corpus: train, valid and test files of generated English
and German sentences, the same bytes for the same seed and sizes on every machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence, Tuple

from experiments.demo.grammar import Grammar
from experiments.demo.lexicon import Dice, build_lexicon
from fairseq_dpq.runs.folder import write_whole

SOURCE, TARGET = "en", "de"
SPLITS = ("test", "valid", "train")  # in the order of drawing: train avoids the other two
Pair = Tuple[str, str]


def generate(seed: int, sizes: dict[str, int]) -> dict[str, list[Pair]]:
    """Sentence pairs of each split. No source sentence of test or valid occurs in a later split.
    A larger training set does not change test and valid."""
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


def write_corpus(out: Path, seed: int, sizes: dict[str, int]) -> dict[str, list[Pair]]:
    """Generate the corpus and write ``<split>.en`` and ``<split>.de`` into ``out``."""
    corpus = generate(seed, sizes)
    out.mkdir(parents=True, exist_ok=True)
    for split, pairs in corpus.items():
        for side, language in enumerate((SOURCE, TARGET)):
            lines = [f"{pair[side]}\n" for pair in pairs]
            write_whole(out / f"{split}.{language}", "".join(lines))
    return corpus


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: ``python -m experiments.demo.corpus OUT --seed 1 --train 12000``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the files")
    parser.add_argument("--seed", type=int, default=1, help="lexicon and sentences (default 1)")
    for split, default in (("train", 12000), ("valid", 500), ("test", 500)):
        what = f"sentences (default {default})"
        parser.add_argument(f"--{split}", type=int, default=default, help=what)
    args = parser.parse_args(argv)
    sizes = {split: getattr(args, split) for split in SPLITS}
    if min(sizes.values()) < 1:
        parser.error("each split needs at least 1 sentence")
    for split, pairs in write_corpus(args.out, args.seed, sizes).items():
        print(f"{split}: {len(pairs):,} sentences")


if __name__ == "__main__":
    main()
