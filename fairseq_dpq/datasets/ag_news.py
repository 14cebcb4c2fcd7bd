"""AG News: news articles of four classes.

Run as ``python -m fairseq_dpq.datasets.ag_news`` or scripts/prepare.sh ag_news.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import zhang2015
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.rows import Columns
from fairseq_dpq.datasets.zhang2015 import ZhangSet

AG_NEWS = ZhangSet(
    name="ag_news",
    title="AG News",
    stem="ag_news",
    fast_ai=Digest(11784419),
    drive="0Bz8a_Dbh9QhbUDNpeUdjb0wxRms",
    original=Digest(11784327, "4e2fc37d369e6e317a8b62d0d2f11d379f8c3dde60c07c35a46b069a246498ad"),
    # A lost line break is a bare backslash here, so that "\new" is the word "new".
    columns=Columns("1", ("2", "3"), 3),
    classes=("World", "Sports", "Business", "Sci/Tech"),
    documents={"train": 120000, "test": 7600},
    paper_types=69322,
    urls=("https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/{}",),
    digests={
        "train.csv": Digest(
            29470338,
            "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
            md5="b1a00f826fdfbd249f79597b59e1dc12",
        ),
        "test.csv": Digest(
            1857427,
            "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
            md5="d52ea96a97a2d943681189a97654912d",
        ),
    },
)


def main(argv: list[str] | None = None) -> int:
    """Prepare AG News; returns the exit code."""
    return zhang2015.main(AG_NEWS, argv)


if __name__ == "__main__":
    sys.exit(main())
