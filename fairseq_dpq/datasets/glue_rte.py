"""RTE: does the first text entail the second? 2,490 and 277 pairs.

Run as ``python -m fairseq_dpq.datasets.glue_rte`` or scripts/prepare.sh glue_rte.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import glue
from fairseq_dpq.datasets.glue import Columns, LabelledSet, glue_files

_COLUMNS = Columns(sentences=(1, 2), label=3)
SET = LabelledSet(
    name="glue_rte",
    title="RTE",
    files=glue_files("RTE", {"train": "train", "valid": "dev"}),
    columns={"train": _COLUMNS, "valid": _COLUMNS},
    labels=("entailment", "not_entailment"),
    rows={"train": 2490, "valid": 277},
)


def main(argv: list[str] | None = None) -> int:
    """Prepare the set; returns the exit code."""
    return glue.main(SET, argv)


if __name__ == "__main__":
    sys.exit(main())
