"""Checkpoints that want to run code, given to fairseq's own commands: nothing runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from helpers import fsq
from helpers.forging import Evil
from helpers.plugin_runs import RUN, TRANSFORMER, last, train
from helpers.toy_checkpoints import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fsq.torch_at_least(2, 6), reason="torch < 2.6 has no allow-list"),
]

DPQ = "--dpq-K 8 --dpq-D 4"


def _in_the_model(state: dict, evil: Any) -> None:
    state["model"]["encoder.embed_tokens.more"] = evil


def _in_cfg(state: dict, evil: Any) -> None:
    state["cfg"]["model"].more = {"a": [(evil,)]}


def _in_args(state: dict, evil: Any) -> None:
    """As fairseq wrote checkpoints before it had cfg."""
    state["args"] = state.pop("cfg")["model"]
    state["args"].more = {"a": [(evil,)]}


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("trained")
    train(corpus, where, *TRANSFORMER, "--disable-validation", updates=1, dpq=DPQ)
    return where


def command(name: str, corpus: Path, file: Path, save_dir: Path) -> list[Any]:
    if name == "--path":
        return ["fairseq-generate", corpus, "--user-dir", fsq.USER_DIR, "--path", file, "--cpu"]
    argv = ["fairseq-train", corpus, "--user-dir", fsq.USER_DIR, *TRANSFORMER, *RUN, *DPQ.split()]
    argv += ["--disable-validation", "--max-update", 2, "--save-dir", save_dir]
    return [*argv, name, file]


@pytest.mark.parametrize("name", ["--restore-file", "--finetune-from-model", "--path"])
@pytest.mark.parametrize("place", [_in_the_model, _in_cfg, _in_args])
def test_a_malicious_pickle_does_not_run(
    corpus, trained, tmp_path, name: str, place: Callable[[dict, Any], None]
) -> None:
    marker, file = tmp_path / "marker", tmp_path / "evil.pt"
    state = last(trained)
    place(state, Evil(f"touch {marker}", os.system))
    torch.save(state, file)
    done = fsq.run(command(name, corpus, file, tmp_path / "out"), ok=False)
    assert not marker.exists()
    # It got as far as the file, and the file is why it failed.
    assert "UnpicklingError" in done.stderr and "GLOBAL posix.system" in done.stderr
    assert not list(tmp_path.glob("out/*.pt"))
    load(file)
    assert marker.exists()  # the pickle would have worked
