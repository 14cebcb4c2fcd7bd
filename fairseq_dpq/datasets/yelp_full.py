"""Yelp reviews of one to five stars.

Run as ``python -m fairseq_dpq.datasets.yelp_full`` or scripts/prepare.sh yelp_full.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import zhang2015
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.rows import Columns
from fairseq_dpq.datasets.zhang2015 import ZhangSet

YELP_FULL = ZhangSet(
    name="yelp_full",
    title="Yelp Review Full",
    stem="yelp_review_full",
    fast_ai=Digest(196146755, "56006b0a17a370f1e366504b1f2c3e3754e4a3dda17d3e718a885c552869a559"),
    drive="0Bz8a_Dbh9QhbZlU4dXhHTFhZQU0",
    original=Digest(
        196146693,
        "9f4dd0a449885e1b5679cf79cd03f06f157190e53f4af4a325aa7bcc9381bee7",
        md5="f7ddfafed1033f68ec72b9267863af6c",
    ),
    columns=Columns("1", ("2",), 2, escaped_newlines=True),
    classes=("1", "2", "3", "4", "5"),
    documents={"train": 650000, "test": 50000},
    paper_types=268414,
)


def main(argv: list[str] | None = None) -> int:
    """Prepare Yelp Review Full; returns the exit code."""
    return zhang2015.main(YELP_FULL, argv)


if __name__ == "__main__":
    sys.exit(main())
