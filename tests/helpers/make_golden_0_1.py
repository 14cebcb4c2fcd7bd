"""How tests/golden/0.1.0 was written, with version 0.1.0 checked out: training and compact
checkpoints of each method, what they look up, and the weights of a run that was not interrupted.

    git checkout d7fc8c7 && python tests/make_golden_0_1.py

Kept as the description of these files; newer versions only read them.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

import torch

from fairseq_dpq.cli import compact
from helpers import fsq

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "0.1.0"
CORPUS = {"n_lines": 60, "n_valid": 4, "n_test": 4, "vocab": 60}
MODEL = shlex.split(
    "--task language_modeling --tokens-per-sample 16 --max-tokens 64 --arch transformer_lm "
    "--decoder-layers 1 --decoder-embed-dim 8 --decoder-input-dim 8 --decoder-output-dim 8 "
    "--decoder-ffn-embed-dim 8 --decoder-attention-heads 1 --share-decoder-input-output-embed "
    "--cpu --optimizer adam --lr 1e-2 --num-workers 0 --disable-validation --no-epoch-checkpoints"
)
METHODS = {
    "sx": "--dpq-K 6 --dpq-D 4",
    "sx-shared": "--dpq-K 6 --dpq-D 4 --dpq-share-subspaces --dpq-key-dim 3 --dpq-tau 0.5",
    "vq": "--dpq-K 6 --dpq-D 4 --dpq-method vq",
    "vq-ema": "--dpq-K 6 --dpq-D 4 --dpq-method vq --dpq-no-normalize --dpq-ema-decay 0.9 "
    "--dpq-commitment 0.5",
}
HALF, WHOLE = 4, 8  # updates


def train(data: Path, folder: Path, flags: str, updates: int) -> Path:
    """One run, from the beginning or from the checkpoint in the folder."""
    argv = [str(data), "--user-dir", fsq.USER_DIR, "--save-dir", str(folder), *MODEL]
    fsq.main("train", [*argv, *shlex.split(flags), "--max-update", str(updates)])
    return folder / "checkpoint_last.pt"


def small(path: Path, data: str = "data") -> dict:
    """A checkpoint with nothing of the machine that wrote it."""
    state = torch.load(path, weights_only=False)
    cfg = state["cfg"]
    cfg["task"]["data"] = data
    kept = ("model", "task", "optimization", "checkpoint", "dataset", "common")
    state["cfg"] = {key: cfg[key] for key in kept}
    for section, key in (("checkpoint", "save_dir"), ("common", "user_dir")):
        state["cfg"][section][key] = None
    for key in ("data", "save_dir", "user_dir"):
        if isinstance(cfg["model"], dict) and key in cfg["model"]:
            cfg["model"][key] = data
    state["extra_state"].pop("previous_training_time", None)
    state["extra_state"].pop("metrics", None)
    return state


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = fsq.make_lm_corpus(folder, **CORPUS)
        for name, flags in METHODS.items():
            half = train(data, Path(folder) / f"{name}-half", flags, HALF)
            whole = train(data, Path(folder) / f"{name}-whole", flags, WHOLE)
            trained = GOLDEN / f"{name}-trained.pt"
            torch.save(small(half), trained)
            torch.save(torch.load(whole, weights_only=False)["model"], GOLDEN / f"{name}-whole.pt")
            os.chdir(GOLDEN)  # the compact file records the name of its source
            if compact.main([trained.name, f"{name}-compact.pt", "--force", "--debug"]):
                sys.exit(1)
            from fairseq_dpq.checkpoints.checkpoint import Checkpoint, training_layer

            checkpoint = Checkpoint.load(trained)
            path, table = next(iter(checkpoint.dpq_record().tables.items()))
            layer = training_layer(checkpoint, path, table)
            with torch.no_grad():
                torch.save(
                    {"rows": layer.weight, "codes": layer.codes()}, GOLDEN / f"{name}-rows.pt"
                )


if __name__ == "__main__":
    main()
