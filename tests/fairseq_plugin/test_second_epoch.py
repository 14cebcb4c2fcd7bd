"""Resuming in a later epoch. fairseq sorts sentences by length and breaks ties with a seed that
counts the epoch in which the process started, so a run resumed in epoch 2 has other batches than
one that was never stopped, with full tables too. Where no two sentences tie, the batches are the
same, and so is every bit of the result."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from helpers import fsq
from helpers.plugin_runs import TRANSFORMER, last, train

pytestmark = pytest.mark.slow

LINES = 24
DPQ = "--dpq-K 8 --dpq-D 4 --dpq-embeddings all --dpq-warmup-updates 3 --dpq-ramp-updates 12"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Sentences of 1, 2, 3, ... words: their order does not depend on a seed."""
    root = tmp_path_factory.mktemp("lengths")
    chosen = random.Random(1)
    for split in ("train", "valid"):
        for language in ("src", "tgt"):
            lines = (
                " ".join(f"{language}{chosen.randrange(30)}" for _ in range(n + 1))
                for n in range(LINES)
            )
            (root / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    argv = ["--source-lang", "src", "--target-lang", "tgt", "--destdir", str(root / "bin")]
    fsq.main(
        "preprocess",
        [*argv, "--trainpref", str(root / "train"), "--validpref", str(root / "valid")],
    )
    return root / "bin"


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_resumed_in_the_second_epoch(corpus: Path, method: str, tmp_path: Path) -> None:
    flags = [*TRANSFORMER, "--batch-size", "3"]  # eight updates in each epoch
    dpq = f"{DPQ} --dpq-method {method}"
    train(corpus, tmp_path / "whole", *flags, updates=20, dpq=dpq)
    train(corpus, tmp_path / "part", *flags, updates=11, dpq=dpq)
    log = train(corpus, tmp_path / "part", *flags, updates=20, dpq=dpq)
    assert "(epoch 2 @ 11 updates)" in log
    whole, resumed = last(tmp_path / "whole")["model"], last(tmp_path / "part")["model"]
    assert whole.keys() == resumed.keys()
    for name, tensor in fsq.learned(whole).items():
        assert torch.equal(tensor, resumed[name]), name
    shutil.rmtree(tmp_path)
