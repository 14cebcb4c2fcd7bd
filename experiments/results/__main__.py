"""python -m experiments.results: write docs/results.md and the pictures from the data."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.results import PAGE, load, markdown
from experiments.results.size_figure import draw, measure
from fairseq_dpq.runs.folder import write_whole


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.results", description=__doc__)
    parser.add_argument(
        "--measure-figure",
        type=Path,
        metavar="DIR",
        help="first measure BLEU against bytes on the demo corpus (about 12 minutes of one core; "
        "run again, it goes on)",
    )
    args = parser.parse_args()
    if args.measure_figure is not None:
        measure(args.measure_figure.absolute())
    write_whole(PAGE, markdown(load()))
    for path in (PAGE, *draw()):
        print(path)


if __name__ == "__main__":
    main()
