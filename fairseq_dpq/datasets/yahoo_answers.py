"""Yahoo! Answers: questions with their best answers, of ten topics.

Run as ``python -m fairseq_dpq.datasets.yahoo_answers`` or scripts/prepare.sh yahoo_answers.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import zhang2015
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.rows import Columns
from fairseq_dpq.datasets.zhang2015 import ZhangSet

YAHOO_ANSWERS = ZhangSet(
    name="yahoo_answers",
    title="Yahoo! Answers",
    stem="yahoo_answers",
    fast_ai=Digest(319476345, "2d4277855faf8b35259009425fa8f7fe1888b5644b47165508942d000f4c96ae"),
    drive="0Bz8a_Dbh9Qhbd2JNdDBsQUdocVU",
    original=Digest(
        319476309,
        "db51df05ca9f6652ef722e7168291a073c859b1ade3493b0ec74174ca0d777a0",
        md5="f3f9899b997a42beb24157e62e3eea8d",
    ),
    columns=Columns("1", ("2", "3", "4"), 4, escaped_newlines=True),
    classes=(
        "Society_&_Culture",
        "Science_&_Mathematics",
        "Health",
        "Education_&_Reference",
        "Computers_&_Internet",
        "Sports",
        "Business_&_Finance",
        "Entertainment_&_Music",
        "Family_&_Relationships",
        "Politics_&_Government",
    ),
    documents={"train": 1400000, "test": 60000},
    paper_types=477522,
)


def main(argv: list[str] | None = None) -> int:
    """Prepare Yahoo! Answers; returns the exit code."""
    return zhang2015.main(YAHOO_ANSWERS, argv)


if __name__ == "__main__":
    sys.exit(main())
