"""Toy corpora, made once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from helpers import fsq


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
    """Sentences of two classes with different words, for the task sentence_prediction."""
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
