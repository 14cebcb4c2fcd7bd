"""python -m experiments.score METRIC [--reference FILE] -- FLAGS...: evaluate a checkpoint.

Runs fairseq-eval-lm (perplexity), fairseq-validate (validate) or fairseq-generate (bleu) with the
flags, and prints the scores as one JSON object. fairseq's own output goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Sequence

from experiments.datasets.detokenize import detokenize
from fairseq_dpq.cli.common import missing_extra
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.runs.runner import run_command

_LINE = re.compile(r"D-(\d+)\t[^\t]*\t(.*)")


def read_lines(path: Path) -> list[str]:
    """Lines of a text, split at newlines only: other separators may be part of a sentence."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return text[:-1].split("\n") if text.endswith("\n") else text.split("\n")


def read_translations(path: Path) -> list[str]:
    """The best translation of each sentence, in the order of the test set."""
    found: dict[int, str] = {}
    for line in read_lines(path):
        match = _LINE.fullmatch(line)
        if match:
            found.setdefault(int(match.group(1)), match.group(2))
    if not found:
        raise CheckpointError(f"{path}: no lines D-<number>; is it output of fairseq-generate?")
    for number in range(len(found)):
        if number not in found:
            raise CheckpointError(f"{path}: no translation of sentence {number} (counted from 0)")
    return [found[number] for number in range(len(found))]


def bleu(translations: Sequence[str], references: Sequence[str], tokenize: str) -> dict[str, Any]:
    """BLEU and the signature that says how it was counted."""
    from sacrebleu.metrics import BLEU

    if len(translations) != len(references):
        raise CheckpointError(
            f"{len(translations)} translations, but {len(references)} reference lines; generate "
            "the whole set, with --required-batch-size-multiple 1"
        )
    metric = BLEU(tokenize=tokenize, force=True)
    score = metric.corpus_score(list(translations), [list(references)]).score
    return {"BLEU": round(score, 4), "signature": str(metric.get_signature())}


def score_translations(output: Path, reference: Path, tokenized: Path | None) -> dict[str, Any]:
    """BLEU of running text; of words as they are too, if there is a tokenised reference."""
    translations = read_translations(output)
    if tokenized is None:
        return bleu(translations, read_lines(reference), "13a")
    # Without <unk>, which sacreBLEU's tokeniser would count as three wrong words.
    known = [[word for word in text.split(" ") if word != "<unk>"] for text in translations]
    running = [detokenize(" ".join(words)) for words in known]
    found = bleu(running, read_lines(reference), "13a")
    own = bleu(translations, read_lines(tokenized), "none")
    return {**found, **{f"tokenised_{name}": value for name, value in own.items()}}


def evaluate(metric: str, flags: Sequence[str]) -> dict[str, Any]:
    """Run fairseq's own command in this process; the numbers that it logs."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.logging import metrics
    from fairseq_cli import eval_lm, generate, validate

    sys.argv = [f"fairseq-{metric}", *flags]  # where fairseq looks for --user-dir
    if metric == "bleu":
        generate.cli_main()
        return {}
    if metric == "perplexity":
        args = options.parse_args_and_arch(options.get_eval_lm_parser())
        return dict(eval_lm.main(convert_namespace_to_omegaconf(args)))
    args = options.parse_args_and_arch(options.get_validation_parser())
    # As fairseq-validate does: what is given here wins over what the checkpoint has.
    given = options.parse_args_and_arch(options.get_validation_parser(), suppress_defaults=True)
    with metrics.aggregate() as found:
        validate.main(convert_namespace_to_omegaconf(args), override_args=given)
    return dict(found.get_smoothed_values())


def score(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print the scores; the exit code."""
    if args.metric == "bleu" and not (args.output and args.reference):
        raise CheckpointError("bleu needs --output and --reference")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = evaluate(args.metric, flags) if flags else {}
            if args.metric == "bleu":
                found = score_translations(args.output, args.reference, args.tokenized_reference)
    except ModuleNotFoundError as error:
        raise CheckpointError(missing_extra(error) or str(error)) from error
    shown = {k: v if isinstance(v, str) else float(v) for k, v in found.items() if v is not None}
    print(json.dumps(shown))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.score", description=__doc__)
    add = parser.add_argument
    add("metric", choices=("perplexity", "validate", "bleu"))
    add("--output", type=Path, help="bleu: the file of translations that the flags make")
    add("--reference", type=Path, help="bleu: running text to compare with")
    add("--tokenized-reference", type=Path,
        help="bleu: the output is tokenised words: score it as it is against this file, and "
        "detokenised against --reference")  # fmt: skip
    return run_command(parser, score, argv)


if __name__ == "__main__":
    sys.exit(main())
