"""CoLA: is a sentence acceptable English? 8,551 and 1,043 sentences.

Run as ``python -m fairseq_dpq.datasets.glue_cola`` or scripts/prepare.sh glue_cola.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import glue
from fairseq_dpq.datasets.glue import Columns, LabelledSet, glue_files

_COLUMNS = Columns(sentences=(3,), label=1, header=False)
SET = LabelledSet(
    name="glue_cola",
    title="CoLA",
    files=glue_files("CoLA", {"train": "train", "valid": "dev"}),
    columns={"train": _COLUMNS, "valid": _COLUMNS},
    labels=("0", "1"),
    rows={"train": 8551, "valid": 1043},
)


def main(argv: list[str] | None = None) -> int:
    """Prepare the set; returns the exit code."""
    return glue.main(SET, argv)


if __name__ == "__main__":
    sys.exit(main())
