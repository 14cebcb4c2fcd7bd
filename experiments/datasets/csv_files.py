"""Text classification on your own CSV or TSV files; label and text columns by option."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.datasets import classification
from experiments.datasets.checksums import hash_file
from experiments.datasets.classification import SPLITS, Labels, Plan
from experiments.datasets.cli import Result, Run, make_parser, run_main
from experiments.datasets.errors import PrepareError
from experiments.datasets.rows import Columns


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("csv_files", "CSV or TSV files with a label and a text in each row: "
                         "check, split into words and a held-out part, fairseq-preprocess.",
                         downloads=False)  # fmt: skip
    add = parser.add_argument
    add("--train", type=Path, required=True, metavar="FILE", help="training rows")
    add("--test", type=Path, metavar="FILE", help="test rows")
    add("--valid", type=Path, metavar="FILE", help="validation rows (default: --held-out of train)")
    add("--label-column", default="1", metavar="N",
        help="column of the label, counted from 1, or its name with --header "
        "(default: %(default)s)")  # fmt: skip
    add("--text-columns", default="2", metavar="N,N",
        help="columns of the text (default: %(default)s)")  # fmt: skip
    add("--header", action="store_true", help="the first row names the columns")
    add("--tab", action="store_true", help="columns are separated by tabs, quotes are plain text")
    add("--escaped-newlines", action="store_true",
        help="line breaks are written as backslash and n")  # fmt: skip
    classification.add_flags(parser)
    return parser


def _plan(args: argparse.Namespace, flags: Result) -> Plan:
    files = {split: getattr(args, split) for split in SPLITS if getattr(args, split) is not None}
    for split, path in files.items():
        if not path.is_file():
            raise PrepareError(f"--{split} {path}: no such file")
    texts = tuple(part.strip() for part in args.text_columns.split(",") if part.strip())
    if not texts:
        raise PrepareError(f"--text-columns {args.text_columns!r}: name at least one column")
    columns = Columns(
        args.label_column.strip(),
        texts,
        header=args.header,
        tab=args.tab,
        escaped_newlines=args.escaped_newlines,
    )
    return Plan(files, columns, Labels(listed=False, open=True), **flags)


def _body(run: Run) -> None:
    flags = classification.read_flags(run.args)
    plan = _plan(run.args, flags)
    columns = plan.columns
    options = {
        **flags,
        "files": {split: hash_file(path) for split, path in plan.files.items()},
        "columns": [columns.label, *columns.texts],
        "dialect": [columns.header, columns.tab, columns.escaped_newlines],
    }
    run.publish(
        options,
        [],
        lambda folder: classification.build(run, plan, folder),
        classification.report,
    )


def main(argv: list[str] | None = None) -> int:
    """Prepare the user's files; returns the exit code."""
    return run_main("csv_files", _parser(), _body, argv)
