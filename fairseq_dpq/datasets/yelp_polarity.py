"""Yelp reviews, negative (one or two stars) or positive (three or four).

Run as ``python -m fairseq_dpq.datasets.yelp_polarity`` or scripts/prepare.sh yelp_polarity.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import zhang2015
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.rows import Columns
from fairseq_dpq.datasets.zhang2015 import ZhangSet

YELP_POLARITY = ZhangSet(
    name="yelp_polarity",
    title="Yelp Review Polarity",
    stem="yelp_review_polarity",
    fast_ai=Digest(166373201, "528f22e286cad085948acbc3bea7e58188416546b0e364d0ae4ca0ce666abe35"),
    drive="0Bz8a_Dbh9QhbNUpYQ2N3SGlFaDg",
    original=Digest(md5="620c8ae4bd5a150b730f1ba9a7c6a4d3"),
    columns=Columns("1", ("2",), 2, escaped_newlines=True),
    classes=("negative", "positive"),
    documents={"train": 560000, "test": 38000},
    paper_types=246739,
)


def main(argv: list[str] | None = None) -> int:
    """Prepare Yelp Review Polarity; returns the exit code."""
    return zhang2015.main(YELP_POLARITY, argv)


if __name__ == "__main__":
    sys.exit(main())
