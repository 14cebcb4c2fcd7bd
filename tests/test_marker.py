"""A checkpoint with DPQ tables names the plugin to a process that was started without it."""

from __future__ import annotations

import sys

import pytest
import torch

from fairseq_dpq.cli import compact
from fairseq_dpq.files import loading
from fairseq_dpq.files.loading import load_checkpoint
from fairseq_dpq.marker import KEY, DPQ_checkpoint__add__user_dir_fairseq_dpq, marked
from helpers import fsq
from helpers.plugin_runs import TRANSFORMER, train
from helpers.toy_checkpoints import make_layer, make_state, save_toy

NAME = "fairseq_dpq.marker.DPQ_checkpoint__add__user_dir_fairseq_dpq"
LOAD = "import sys, torch; torch.load(sys.argv[1])"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("marked")
    corpus = fsq.make_corpus(root, n_lines=40, n_valid=8, n_test=8)
    train(corpus, root / "ck", *TRANSFORMER, updates=1, dpq="--dpq-K 8 --dpq-D 4")
    return corpus, root / "ck" / "checkpoint_last.pt"


def test_the_marker_is_the_first_thing_in_the_file(tmp_path) -> None:
    """The state of a transformer has an argparse.Namespace, which torch refuses too."""
    path = tmp_path / "a.pt"
    torch.save(marked(make_state(make_layer())), path)
    assert next(iter(load_checkpoint(path))) == KEY
    if fsq.torch_at_least(2, 6):
        done = fsq.run([sys.executable, "-c", LOAD, path], ok=False)
        assert f"Unsupported global: GLOBAL {NAME} was not an allowed global" in done.stderr
    small = tmp_path / "small.pt"
    assert compact.main([str(path), str(small)]) == 0
    state = load_checkpoint(small)
    assert next(iter(state)) == KEY and state[KEY] is DPQ_checkpoint__add__user_dir_fairseq_dpq


def test_older_versions_of_torch_read_it_by_our_own_list(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.pt"
    torch.save(marked(make_state(make_layer())), path)
    monkeypatch.setattr(loading, "_TORCH", min(loading._TORCH, (1, 13)))
    assert load_checkpoint(path)[KEY] is DPQ_checkpoint__add__user_dir_fairseq_dpq


def test_a_checkpoint_without_it_still_loads(tmp_path) -> None:
    assert KEY not in load_checkpoint(save_toy(tmp_path / "a.pt"))


@pytest.mark.slow
def test_a_command_without_the_plugin(trained) -> None:
    corpus, checkpoint = trained
    argv = ["fairseq-generate", corpus, "--path", checkpoint, "--cpu", "--num-workers", "0"]
    argv += ["--required-batch-size-multiple", "1", "--max-tokens", "400"]
    if fsq.torch_at_least(2, 6):
        done = fsq.run(argv, ok=False)
        assert NAME in done.stderr and "Namespace" not in done.stderr
    # Without torch's protection the marker is imported, and registers the plugin.
    done = fsq.run(argv, env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})
    assert done.stdout.count("\nH-") == 8


@pytest.mark.slow
def test_resuming_finds_it_in_place(trained) -> None:
    corpus, checkpoint = trained
    log = train(corpus, checkpoint.parent, *TRANSFORMER, updates=2, dpq="--dpq-K 8 --dpq-D 4")
    assert "Loaded checkpoint" in log
    state = load_checkpoint(checkpoint)
    assert next(iter(state)) == KEY and list(state).count(KEY) == 1


@pytest.mark.slow
def test_a_model_without_tables_has_no_marker(trained, tmp_path) -> None:
    corpus, _ = trained
    train(corpus, tmp_path, *TRANSFORMER, updates=1)
    assert KEY not in load_checkpoint(tmp_path / "checkpoint_last.pt")
