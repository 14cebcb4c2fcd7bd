"""fairseq-dpq-report CKPT... --out DIR: a page, figures and numbers on checkpoints side by side."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.cli.common import add_common, tool
from fairseq_dpq.cli.text import short_names
from fairseq_dpq.files.data import read_dictionary
from fairseq_dpq.files.errors import CheckpointError, printable
from fairseq_dpq.report.build import build_report
from fairseq_dpq.report.models import join_compact, load_model
from fairseq_dpq.report.page import PAGE, check_folder, write_report
from fairseq_dpq.report.words import search_data
from fairseq_dpq.runs.logs import read_curves


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-report."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-report",
        description="Write DIR/report.html, which needs no network, with the same figures as PNG "
        "and SVG and the numbers as JSON: sizes, use of codes, neighbours, codes of words, curves.",
    )
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="+",
        metavar="CKPT",
        help="training, compact and full checkpoints and exported tables; NAME=CKPT gives a name. "
        "A training checkpoint followed by the compact file made of it is one model",
    )
    add("--out", required=True, metavar="DIR", help="folder of the report")
    add("--full", metavar="CKPT", help="full checkpoint to compare neighbours with")
    several: Any = {"action": "append", "default": []}
    add(
        "--dict",
        metavar="[TABLE=]FILE",
        help="fairseq dictionary, of one table or of all (default: that of each checkpoint's data)",
        **several,
    )
    add("--words", nargs="+", default=[], metavar="WORD", help="symbols to show (default: a few)")
    log = "training log of fairseq, or TensorBoard folder; may be repeated"
    add("--log", metavar="[NAME=]PATH", help=log, **several)
    add("--neighbours", type=int, default=10, help="how many (default 10)")
    add("--title", default="DPQ report", help="title of the page")
    add("--force", action="store_true", help="replace a report that exists")
    add_common(parser)
    return parser


def report(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    out = Path(args.out)
    if not 1 <= args.neighbours <= 100:
        raise CheckpointError(f"--neighbours {args.neighbours}: give a number from 1 to 100")
    given = list(args.checkpoints)
    if args.full is not None and args.full not in given:
        given.insert(0, args.full)
    names, paths = _named(given)
    check_folder(out, paths, args.force)
    dictionaries = dict(map(_split, args.dict))
    for path in dictionaries.values():
        read_dictionary(path)
    curves = {name: read_curves(path) for name, path in zip(*_named(args.log))}
    models = [load_model(path, name, dictionaries, args.trust) for name, path in zip(names, paths)]
    reference = None if args.full is None else models[given.index(args.full)]
    if reference is not None and reference.kind != "full":
        raise CheckpointError(
            f"--full {args.full} is a {reference.kind} checkpoint, not a full one"
        )
    models = join_compact(models)
    how: dict[str, Any] = {"reference": reference, "curves": curves}
    facts = build_report(models, words=args.words, neighbours=args.neighbours, **how)
    search = search_data(models, args.neighbours)
    write_report(facts, search, out, args.title, args.force)
    if args.json:
        print(json.dumps(facts, indent=1))
        return
    for note in facts["notes"]:
        print(f"note: {printable(note)}", file=sys.stderr)
    print(printable(out / PAGE))


def _split(text: str) -> tuple[str, Path]:
    """Name and path of NAME=PATH or PATH, where such a path may contain an equals sign."""
    name, equals, rest = text.partition("=")
    named = bool(equals and name) and not os.path.exists(text)
    return (name, Path(rest)) if named else ("", Path(text))


def _named(given: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Names and paths; where no name is given, a short one."""
    pairs = [_split(text) for text in given]
    short = iter(short_names([p.absolute().with_suffix("") for name, p in pairs if not name]))
    names = [name or next(short) for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{twice} is there twice; give names that differ: NAME=PATH")
    return names, [path for _, path in pairs]


main = tool(get_parser, report)

if __name__ == "__main__":
    sys.exit(main())
