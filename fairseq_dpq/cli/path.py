"""fairseq-dpq-path: the folder that --user-dir needs where fairseq does not find it by name."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from fairseq_dpq.cli.common import tool
from fairseq_dpq.files.errors import CheckpointError

PACKAGE = Path(__file__).resolve().parents[1]


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-path."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-path",
        description="Print the folder of the plugin: fairseq-train DATA --user-dir "
        '"$(fairseq-dpq-path)" works wherever fairseq and the plugin are installed.',
    )
    parser.add_argument(
        "--link",
        action="store_true",
        help="make a link to it beside the fairseq package, where --user-dir fairseq_dpq finds it "
        "by name",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def link(beside: Path) -> Path:
    """Link the plugin's folder beside another package; returns the link."""
    place = beside / PACKAGE.name
    if place.exists() and os.path.samefile(place, PACKAGE):
        return place
    try:
        place.symlink_to(PACKAGE, target_is_directory=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot link {place} to {PACKAGE}: {error.strerror}; use --user-dir {PACKAGE}"
        ) from error
    return place


def path(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    if not args.link:
        print(PACKAGE)
        return
    spec = importlib.util.find_spec("fairseq")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'fairseq'", name="fairseq")
    print(link(Path(spec.origin).parents[1]))


main = tool(get_parser, path)

if __name__ == "__main__":
    sys.exit(main())
