"""XNLI, Chinese: MNLI translated for training, 2,490 pairs of valid and 5,010 of test.

BERT's own script reads XNLI in Chinese only, and the paper's figures fit that.

Run as ``python -m fairseq_dpq.datasets.glue_xnli`` or scripts/prepare.sh glue_xnli.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import glue
from fairseq_dpq.datasets.glue import Columns, LabelledSet, tsv
from fairseq_dpq.datasets.sources import Wanted

_MT = "XNLI-MT-1.0"
_SET = "XNLI-1.0"


def _file(archive: str, member: str) -> Wanted:
    hosts = ("https://dl.fbaipublicfiles.com/XNLI", "https://www.nyu.edu/projects/bowman/xnli")
    urls = tuple(f"{host}/{archive}.zip" for host in hosts)
    return tsv(f"{archive}.zip", urls, f"{archive}/{member}")


_HELD_OUT = Columns(sentences=(6, 7), label=1, only=(0, "zh"))
SET = LabelledSet(
    name="glue_xnli",
    title="XNLI (Chinese)",
    files={
        "train": _file(_MT, "multinli/multinli.train.zh.tsv"),
        "valid": _file(_SET, "xnli.dev.tsv"),
        "test": _file(_SET, "xnli.test.tsv"),
    },
    columns={
        "train": Columns(sentences=(0, 1), label=2),
        "valid": _HELD_OUT,
        "test": _HELD_OUT,
    },
    labels=("contradiction", "neutral", "entailment"),
    rows={"train": 392702, "valid": 2490, "test": 5010},
    spellings={"contradictory": "contradiction"},
)


def main(argv: list[str] | None = None) -> int:
    """Prepare the set; returns the exit code."""
    return glue.main(SET, argv)


if __name__ == "__main__":
    sys.exit(main())
