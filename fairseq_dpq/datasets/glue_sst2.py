"""SST-2: is a phrase of a film review positive? 67,349 and 872 sentences.

Run as ``python -m fairseq_dpq.datasets.glue_sst2`` or scripts/prepare.sh glue_sst2.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import glue
from fairseq_dpq.datasets.glue import Columns, LabelledSet, glue_files

_COLUMNS = Columns(sentences=(0,), label=1)
SET = LabelledSet(
    name="glue_sst2",
    title="SST-2",
    files=glue_files("SST-2", {"train": "train", "valid": "dev"}),
    columns={"train": _COLUMNS, "valid": _COLUMNS},
    labels=("0", "1"),
    rows={"train": 67349, "valid": 872},
)


def main(argv: list[str] | None = None) -> int:
    """Prepare the set; returns the exit code."""
    return glue.main(SET, argv)


if __name__ == "__main__":
    sys.exit(main())
