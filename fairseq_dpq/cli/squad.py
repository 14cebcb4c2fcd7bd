"""fairseq-dpq-squad CKPT --data DIR: answers to the questions of SQuAD, exact match and F1."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fairseq_dpq.cli.common import tool
from fairseq_dpq.files.data import load_model
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.writer import check_target, write_whole


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-squad."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-squad",
        description="Answer the questions of a prepared split with a checkpoint of --task squad, "
        "training or compact. Prints exact match and F1.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT")
    add("--data", required=True, help="folder of scripts/prepare.sh squad1 or squad2")
    add("--subset", default="valid", help="split (default: %(default)s)")
    add("--predictions", type=Path, metavar="FILE",
        help="write the answers: JSON, from id to text, as SQuAD's own script reads it"
        )  # fmt: skip
    add("--n-best", type=int, default=20, metavar="N",
        help="spans that are compared (default: %(default)s)")  # fmt: skip
    add("--n-best-file", type=Path, metavar="FILE",
        help="write the best spans of each question, with probabilities and null odds")  # fmt: skip
    add("--force", action="store_true", help="replace files that exist")
    add("--max-answer-length", type=int, default=30, metavar="N",
        help="longest answer in pieces (default: %(default)s)")  # fmt: skip
    add("--null-threshold", type=float, default=0.0, metavar="X",
        help="SQuAD 2.0: no answer where the null score is more than X above the best span "
        "(default: %(default)s)")  # fmt: skip
    add("--doc-stride", type=int, metavar="N", help="default: that of the training")
    add("--batch-size", type=int, default=16, metavar="N", help="(default: %(default)s)")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _check(args: argparse.Namespace) -> None:
    for name in ("n_best", "max_answer_length", "batch_size", "doc_stride"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CheckpointError(f"--{name.replace('_', '-')} {value} is not positive")
    examples = Path(args.data) / f"{args.subset}.examples.jsonl"
    if not examples.is_file():
        raise CheckpointError(f"no file {examples}; run: scripts/prepare.sh squad1, or squad2")
    targets = [path for path in (args.predictions, args.n_best_file) if path is not None]
    if len({path.absolute() for path in targets}) < len(targets):
        raise CheckpointError("--predictions and --n-best-file are the same file")
    for path in targets:
        check_target(path, [Path(args.checkpoint), examples], args.force)


def answer(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    _check(args)
    changes = {"data": args.data, "doc_stride": args.doc_stride}
    changes = {name: value for name, value in changes.items() if value is not None}
    fix = "; fine-tune it: scripts/train.sh squad1"
    model, task = load_model(Path(args.checkpoint), "squad", changes, fix)
    from fairseq_dpq.fairseq_plugin.tasks import squad_answers as answers  # fairseq is there now

    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    lengths = (args.n_best, args.max_answer_length, args.batch_size)
    found = list(answers.predict(model, task, args.subset, *lengths, device))
    golds = {p.id: p.golds for p in found}
    unanswerable = any(not texts for texts in golds.values())
    texts = {p.id: p.text(args.null_threshold if unanswerable else None) for p in found}
    facts: dict[str, Any] = {"questions": len(found), **answers.score(texts, golds)}
    if unanswerable:
        facts["best_f1"], facts["best_threshold"] = answers.best_threshold(found)
    if args.predictions is not None:
        _write(args.predictions, texts, args.force)
    if args.n_best_file is not None:
        ranked = {
            p.id: {"null_odds": p.odds, "n_best": answers.probabilities(p.answers)} for p in found
        }
        _write(args.n_best_file, ranked, args.force)
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
        print(f"{name.replace('_', ' ')}: {shown}")


def _write(path: Path, content: Any, force: bool) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode("utf-8")), None, force)


main = tool(get_parser, answer)

if __name__ == "__main__":
    sys.exit(main())
