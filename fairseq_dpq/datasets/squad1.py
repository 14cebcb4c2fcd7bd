"""SQuAD 1.1: 87,599 and 10,570 questions, each with an answer in its paragraph.

Run as ``python -m fairseq_dpq.datasets.squad1`` or scripts/prepare.sh squad1.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import squad
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.squad import QuestionSet, question_file

SET = QuestionSet(
    name="squad1",
    title="SQuAD 1.1",
    files={
        "train": question_file(
            "train-v1.1.json",
            Digest(30288272, "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
        ),
        "valid": question_file(
            "dev-v1.1.json",
            Digest(4854279, "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"),
        ),
    },
    questions={"train": 87599, "valid": 10570},
    unanswerable=False,
)


def main(argv: list[str] | None = None) -> int:
    """Prepare the set; returns the exit code."""
    return squad.main(SET, argv)


if __name__ == "__main__":
    sys.exit(main())
