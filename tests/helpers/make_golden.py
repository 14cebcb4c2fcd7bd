"""Writes the golden files of the compact format, tests/golden/compact-v3.*: run once for each
version of the format, never again for an old one.

    PYTHONPATH=tests python -m helpers.make_golden

The table is set by the rules below, so that a test can tell its rows without these tools.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

import torch

from fairseq_dpq.cli import compact, export
from helpers import fsq

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
N, DIM, K, D = 64, 8, 6, 4
PAD = 1
FLAGS = (
    "--task language_modeling --tokens-per-sample 16 --max-tokens 64 --arch transformer_lm "
    "--decoder-layers 1 --decoder-embed-dim 8 --decoder-input-dim 8 --decoder-output-dim 8 "
    "--decoder-ffn-embed-dim 8 --decoder-attention-heads 1 --share-decoder-input-output-embed "
    f"--dpq-K {K} --dpq-D {D} --dpq-method vq --dpq-schedule warmup "
    "--cpu --optimizer adam --lr 1e-3 --max-update 1 --num-workers 0 --disable-validation"
)


def code(row: int, group: int) -> int:
    """The code of a symbol: group 3 uses only the codes 1 and 4."""
    return (7 * row + 5 * group) % K if group < 3 else 1 + 3 * (row % 2)


def value(group: int, code: int) -> list[float]:
    """A row of the value matrix."""
    return [(32 * group + 4 * code + i) / 8 for i in range(DIM // D)]


def row(index: int) -> list[float]:
    """A row of the table."""
    if index == PAD:
        return [0.0] * DIM
    return [x for group in range(D) for x in value(group, code(index, group))]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = fsq.make_lm_corpus(folder, n_lines=40, n_valid=4, n_test=4, vocab=N - 4)
        argv = [str(data), "--user-dir", fsq.USER_DIR, "--save-dir", folder, *shlex.split(FLAGS)]
        fsq.main("train", argv)
        os.chdir(folder)  # the name of the training checkpoint is recorded: no path of this machine
        trained = Path("trained.pt")
        state = torch.load(Path(folder) / "checkpoint_last.pt", weights_only=False)
        path = "decoder.embed_tokens"
        state["model"][f"{path}.values"] = torch.tensor(
            [[value(group, k) for k in range(K)] for group in range(D)]
        )
        queries = [[x for g in range(D) for x in value(g, code(i, g))] for i in range(N)]
        state["model"][f"{path}.query"] = torch.tensor(queries)
        cfg = state["cfg"]
        state["cfg"] = {"model": cfg["model"], "task": {**cfg["task"], "data": "data"}}
        torch.save(state, trained)
        GOLDEN.mkdir(exist_ok=True)
        small = GOLDEN / "compact-v3.pt"
        if compact.main([str(trained), str(small), "--lossless-shrink", "--debug"]):
            sys.exit(1)
        table = GOLDEN / "compact-v3.safetensors"
        export.main([str(small), str(table), "--dict", str(data / "dict.txt"), "--debug"])
        text = (data / "dict.txt").read_bytes()
        if text != (GOLDEN / "dict.txt").read_bytes():
            sys.exit("the dictionary differs from that of the first version")


if __name__ == "__main__":
    main()
