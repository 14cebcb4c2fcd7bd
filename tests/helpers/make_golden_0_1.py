"""The runs behind tests/golden/0.1.0: training and compact checkpoints of each method, written with
version 0.1.0, what they look up, and the weights of a run that was not interrupted; and the tables
of runs of sx and vq without a tied output.

The script that wrote them is in the commit that added them (`git log -- tests/golden/0.1.0`). Newer
versions only read these files.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Sequence

from helpers import fsq

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "0.1.0"
CORPUS = {"n_lines": 60, "n_valid": 4, "n_test": 4, "vocab": 60}
MODEL = shlex.split(
    "--task language_modeling --tokens-per-sample 16 --max-tokens 64 --arch transformer_lm "
    "--decoder-layers 1 --decoder-embed-dim 8 --decoder-input-dim 8 --decoder-output-dim 8 "
    "--decoder-ffn-embed-dim 8 --decoder-attention-heads 1 --share-decoder-input-output-embed "
    "--cpu --optimizer adam --lr 1e-2 --num-workers 0 --disable-validation --no-epoch-checkpoints"
)
UNTIED = [flag for flag in MODEL if flag != "--share-decoder-input-output-embed"]
METHODS = {
    "sx": "--dpq-K 6 --dpq-D 4",
    "sx-shared": "--dpq-K 6 --dpq-D 4 --dpq-share-subspaces --dpq-key-dim 3 --dpq-tau 0.5",
    "vq": "--dpq-K 6 --dpq-D 4 --dpq-method vq",
    "vq-ema": "--dpq-K 6 --dpq-D 4 --dpq-method vq --dpq-no-normalize --dpq-ema-decay 0.9 "
    "--dpq-commitment 0.5",
}
WHOLE = 8  # updates; the checkpoints are from the fourth


def train(data: Path, folder: Path, flags: str, updates: int, model: Sequence[str] = MODEL) -> Path:
    """One run, from the beginning or from the checkpoint in the folder."""
    argv = [str(data), "--user-dir", fsq.USER_DIR, "--save-dir", str(folder), *model]
    fsq.main("train", [*argv, *shlex.split(flags), "--max-update", str(updates)])
    return folder / "checkpoint_last.pt"
