"""MRPC: do two sentences say the same? 3,668 and 408 pairs, split as in GLUE.

The licence forbids GLUE to distribute the split, so train.tsv and dev.tsv come from --from.

Run as ``python -m fairseq_dpq.datasets.glue_mrpc`` or scripts/prepare.sh glue_mrpc.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import glue
from fairseq_dpq.datasets.glue import Columns, LabelledSet, glue_files

_COLUMNS = Columns(sentences=(3, 4), label=0)
SET = LabelledSet(
    name="glue_mrpc",
    title="MRPC",
    files=glue_files("MRPC", {"train": "train", "valid": "dev"}),
    columns={"train": _COLUMNS, "valid": _COLUMNS},
    labels=("0", "1"),
    rows={"train": 3668, "valid": 408},
)


def main(argv: list[str] | None = None) -> int:
    """Prepare the set; returns the exit code."""
    return glue.main(SET, argv)


if __name__ == "__main__":
    sys.exit(main())
