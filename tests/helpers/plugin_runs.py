"""Training with the plugin inside this process, and the flags of the models that are trained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from helpers import fsq
from helpers.toy_checkpoints import load

RUN = shlex.split(
    "--cpu --optimizer adam --lr 5e-3 --no-progress-bar --log-format simple --log-interval 1 "
    "--num-workers 0 --no-epoch-checkpoints --dropout 0.1 --required-batch-size-multiple 1"
)
SMALL = (
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2 "
)
TRANSFORMER = ["--arch", "transformer", "--max-tokens", "200", *SMALL.split()]
LM = shlex.split(
    "--task language_modeling --tokens-per-sample 40 --max-tokens 320 --arch transformer_lm "
    "--decoder-layers 1 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 "
    "--decoder-ffn-embed-dim 64 --decoder-attention-heads 2"
)


def train(data: Path, save_dir: Path, *flags: str, updates: int = 6, dpq: str = "") -> str:
    """One `fairseq-train` inside this process; returns its log."""
    argv = [data, "--user-dir", fsq.USER_DIR, "--save-dir", save_dir, *RUN]
    argv += ["--max-update", updates, *shlex.split(dpq), *flags]
    return fsq.main("train", [str(a) for a in argv])


def last(save_dir: Path) -> dict:
    """The last checkpoint of a run."""
    return load(save_dir / "checkpoint_last.pt")


def parameters(log: str) -> int:
    """The number of parameters that a training log states."""
    return int(re.findall(r"num. shared model params: ([\d,]+)", log)[0].replace(",", ""))
