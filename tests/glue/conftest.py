"""Toy corpora, made once, and a way to train on them inside this process."""

from __future__ import annotations

import random
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fsq
from toy_checkpoints import load

RUN = shlex.split(
    "--cpu --optimizer adam --lr 5e-3 --no-progress-bar --log-format simple --log-interval 1 "
    "--num-workers 0 --no-epoch-checkpoints --dropout 0.1 --required-batch-size-multiple 1"
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return fsq.make_corpus(tmp_path_factory.mktemp("pair"), n_lines=120, n_valid=20, n_test=21)


@pytest.fixture(scope="session")
def joined(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("joined")
    return fsq.make_corpus(root, n_lines=120, n_valid=20, n_test=21, joined=True)


@pytest.fixture(scope="session")
def lm(tmp_path_factory) -> Path:
    return fsq.make_lm_corpus(tmp_path_factory.mktemp("mono"), n_lines=160, n_valid=20, n_test=21)


@pytest.fixture(scope="session")
def sentences(tmp_path_factory) -> Path:
    """Sentences of two classes, each with words of its own, for sentence_prediction."""
    root = tmp_path_factory.mktemp("sentences")
    rng = random.Random(3)
    for split, n in (("train", 120), ("valid", 24)):
        labels = [rng.randrange(2) for _ in range(n)]
        lines = [[20 * k + rng.randrange(20) for _ in range(rng.randint(3, 9))] for k in labels]
        (root / f"{split}.input0").write_text(
            "".join(" ".join(f"w{w}" for w in line) + "\n" for line in lines)
        )
        (root / f"{split}.label").write_text("".join(f"{k}\n" for k in labels))
    for part in ("input0", "label"):
        argv = ["--only-source", "--destdir", str(root / "bin" / part)]
        for split in ("train", "valid"):
            argv += [f"--{split}pref", str(root / f"{split}.{part}")]
        fsq.main("preprocess", argv)
    return root / "bin"


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
    import re

    return int(re.findall(r"num. shared model params: ([\d,]+)", log)[0].replace(",", ""))
