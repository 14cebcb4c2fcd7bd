"""Checkpoints that version 0.1.0 wrote, trained and compact, of each method: the same bits."""

from __future__ import annotations

import shutil

import pytest
import torch

from fairseq_dpq.checkpoints.checkpoint import Checkpoint, stored_form, training_layer
from fairseq_dpq.cli import compact
from helpers import fsq
from helpers.make_golden_0_1 import CORPUS, GOLDEN, METHODS, UNTIED, WHOLE, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return fsq.make_lm_corpus(tmp_path_factory.mktemp("golden"), **CORPUS)


@pytest.mark.parametrize("name", METHODS)
def test_rows_and_codes_are_the_same_bits(name: str) -> None:
    wanted = torch.load(GOLDEN / f"{name}-rows.pt")
    trained = Checkpoint.load(GOLDEN / f"{name}-trained.pt")
    ((path, table),) = trained.dpq_record().tables.items()
    layer = training_layer(trained, path, table)
    with torch.no_grad():
        assert torch.equal(layer.weight, wanted["rows"])
    assert torch.equal(layer.codes(), wanted["codes"])
    packed = Checkpoint.load(GOLDEN / f"{name}-compact.pt")
    form = stored_form(packed, path, packed.dpq_record().tables[path])
    assert torch.equal(form.dense(), wanted["rows"])


@pytest.mark.parametrize("name", METHODS)
def test_compaction_gives_the_same_tensors(name: str, tmp_path) -> None:
    target = tmp_path / "compact.pt"
    assert compact.main([str(GOLDEN / f"{name}-trained.pt"), str(target), "--debug"]) == 0
    old, new = Checkpoint.load(GOLDEN / f"{name}-compact.pt"), Checkpoint.load(target)
    for key, tensor in old.weights.items():
        assert torch.equal(new.weights[key], tensor), key


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_as_version_0_1_would_have(name: str, corpus, tmp_path) -> None:
    """With the command of 0.1.0, the rest of the run gives the weights of its own whole run."""
    shutil.copy(GOLDEN / f"{name}-trained.pt", tmp_path / "checkpoint_last.pt")
    weights = fsq.weights(train(corpus, tmp_path, METHODS[name], WHOLE))
    for key, tensor in torch.load(GOLDEN / f"{name}-whole.pt").items():
        assert torch.equal(weights[key], tensor), key
    # Once more: the checkpoint is now one of this version, and the options are still those of 0.1.
    train(corpus, tmp_path, METHODS[name], WHOLE + 2)


PAPER = "--dpq-warmup-updates 0 --dpq-batch-stats"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("sx", ""),
        # Its regulariser was a mean over the 8 dimensions, not their sum.
        ("vq", "--dpq-ema-decay 0 --dpq-commitment 0 --dpq-reg-weight 0.125"),
    ],
)
def test_training_as_in_the_paper_is_that_of_version_0_1(name, flags, corpus, tmp_path) -> None:
    """From the first update on: the figures of the language-model recipes are those of 0.1."""
    flags = f"{METHODS[name]} {PAPER} {flags}"
    weights = fsq.weights(train(corpus, tmp_path, flags, WHOLE, UNTIED))
    for key, tensor in torch.load(GOLDEN / f"{name}-untied-whole.pt").items():
        if "norm" in key:  # summed up in another way since
            torch.testing.assert_close(weights[key], tensor, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(weights[key], tensor), key
