"""SQuAD 2.0: 130,319 and 11,873 questions, a part of them without an answer.

Run as ``python -m fairseq_dpq.datasets.squad2`` or scripts/prepare.sh squad2.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import squad
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.squad import QuestionSet, question_file

SET = QuestionSet(
    name="squad2",
    title="SQuAD 2.0",
    files={
        "train": question_file(
            "train-v2.0.json",
            Digest(42123633, "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002"),
        ),
        "valid": question_file(
            "dev-v2.0.json",
            Digest(4370528, "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
        ),
    },
    questions={"train": 130319, "valid": 11873},
    unanswerable=True,
)


def main(argv: list[str] | None = None) -> int:
    """Prepare the set; returns the exit code."""
    return squad.main(SET, argv)


if __name__ == "__main__":
    sys.exit(main())
