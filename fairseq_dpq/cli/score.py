"""python -m fairseq_dpq.cli.score OUT --reference REF: sacreBLEU of fairseq-generate's output
against untouched text; for text that came tokenised, tokenised BLEU as well."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Sequence

from fairseq_dpq.cli.common import missing_extra
from fairseq_dpq.datasets.detokenize import detokenize

_LINE = re.compile(r"D-(\d+)\t[^\t]*\t(.*)")


class ScoreError(Exception):
    """Files that cannot be scored against each other."""


def read_lines(path: Path) -> list[str]:
    """Lines of a text, split at newlines only: other separators may be part of a sentence."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScoreError(f"{path}: {error}") from error
    return text[:-1].split("\n") if text.endswith("\n") else text.split("\n")


def read_translations(path: Path) -> list[str]:
    """The best translation of each sentence, in the order of the test set."""
    found: dict[int, str] = {}
    for line in read_lines(path):
        match = _LINE.fullmatch(line)
        if match:
            found.setdefault(int(match.group(1)), match.group(2))
    if not found:
        raise ScoreError(f"{path}: no lines D-<number>; is it output of fairseq-generate?")
    missing = [i for i in range(max(found)) if i not in found]
    if missing:
        raise ScoreError(f"{path}: no translation of sentence {missing[0]} (counted from 0)")
    return [found[i] for i in range(len(found))]


def score(translations: Sequence[str], references: Sequence[str], tokenize: str) -> list[str]:
    """BLEU and the signature that says how it was counted."""
    from sacrebleu.metrics import BLEU

    if len(translations) != len(references):
        raise ScoreError(
            f"{len(translations)} translations, but {len(references)} reference lines; generate "
            "the whole set, with --required-batch-size-multiple 1"
        )
    bleu = BLEU(tokenize=tokenize, force=True)
    result = bleu.corpus_score(list(translations), [list(references)])
    return [result.format(width=2), str(bleu.get_signature())]


def _known(words: str) -> str:
    """Without <unk>, which sacreBLEU's tokeniser would count as three wrong words."""
    return " ".join(word for word in words.split(" ") if word != "<unk>")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the scores; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_dpq.cli.score", description=__doc__)
    add = parser.add_argument
    add("output", metavar="OUT", type=Path, help="what fairseq-generate wrote")
    add("--reference", required=True, type=Path, help="detokenised reference")
    add(
        "--tokenized-reference",
        type=Path,
        help="the output is tokenised words: score it as it is against this file, and detokenised "
        "against --reference",
    )
    args = parser.parse_args(argv)
    try:
        translations = read_translations(args.output)
        running = translations
        if args.tokenized_reference:
            running = [detokenize(_known(t)) for t in translations]
        lines = score(running, read_lines(args.reference), "13a")
        print(f"detokenised {lines[0]}\n  sacreBLEU {lines[1]}")
        if args.tokenized_reference:
            lines = score(translations, read_lines(args.tokenized_reference), "none")
            print(f"tokenised {lines[0]}\n  sacreBLEU {lines[1]}")
    except ModuleNotFoundError as error:
        if not missing_extra(error):
            raise
        print(f"{parser.prog}: error: {missing_extra(error)}", file=sys.stderr)
        return 2
    except ScoreError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
