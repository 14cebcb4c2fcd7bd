"""MNLI: entailment, neutral or contradiction? 392,702 pairs; valid is the matched dev set.

Run as ``python -m fairseq_dpq.datasets.glue_mnli`` or scripts/prepare.sh glue_mnli.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import glue
from fairseq_dpq.datasets.glue import Columns, LabelledSet, glue_files

SET = LabelledSet(
    name="glue_mnli",
    title="MNLI",
    files=glue_files("MNLI", {"train": "train", "valid": "dev_matched", "test": "dev_mismatched"}),
    columns={
        "train": Columns(sentences=(8, 9), label=11),
        "valid": Columns(sentences=(8, 9), label=15),
        "test": Columns(sentences=(8, 9), label=15),
    },
    labels=("contradiction", "neutral", "entailment"),
    rows={"train": 392702, "valid": 9815, "test": 9832},
)


def main(argv: list[str] | None = None) -> int:
    """Prepare the set; returns the exit code."""
    return glue.main(SET, argv)


if __name__ == "__main__":
    sys.exit(main())
