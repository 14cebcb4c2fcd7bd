"""Ensembles of DPQ and full checkpoints: each model follows its own file."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fairseq_dpq import DPQEmbedding
from helpers import fsq
from helpers.plugin_runs import LM, train

pytestmark = pytest.mark.slow

FILES = ("dpq.pt", "full.pt")


@pytest.fixture(scope="module")
def pair(lm, tmp_path_factory):
    """A folder with a DPQ checkpoint and a full one."""
    folder = tmp_path_factory.mktemp("ensemble")
    for name, dpq in zip(FILES, ("--dpq-K 8 --dpq-D 4", "")):
        train(lm, folder / name, *LM, "--no-save-optimizer-state", updates=3, dpq=dpq)
        (folder / name / "checkpoint_last.pt").rename(folder / f"last-{name}")
    return folder


def _scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.decoder.eval()(torch.arange(4, 24).view(2, 10))[0]


@pytest.mark.parametrize("names", [FILES, FILES[::-1]], ids=" ".join)
@pytest.mark.parametrize("old_task", [False, True], ids=["", "old task"])
def test_each_model_scores_as_alone(pair, names, old_task: bool, monkeypatch) -> None:
    """The task is built from the first file's config, which has its DPQ options."""
    import fairseq
    from fairseq import checkpoint_utils, models
    from fairseq.tasks.language_modeling import LanguageModelingTask

    if old_task:  # tasks that do not know `from_checkpoint` do not pass it on either
        if fairseq.__version__.startswith("0.12.2"):
            pytest.skip("this fairseq does not say either that the task is a checkpoint's")

        def build_model(self, cfg):
            return models.build_model(cfg, self)

        monkeypatch.setattr(LanguageModelingTask, "build_model", build_model)
    load = checkpoint_utils.load_model_ensemble_and_task
    together, _, _ = load([str(pair / f"last-{name}") for name in names])
    for name, model in zip(names, together):
        table = model.decoder.embed_tokens
        assert isinstance(table, DPQEmbedding if name == "dpq.pt" else nn.Embedding)
        (alone,), _, _ = load([str(pair / f"last-{name}")])
        assert torch.equal(_scores(model), _scores(alone))


def test_from_pretrained(pair, lm) -> None:
    from fairseq.models.transformer_lm import TransformerLanguageModel

    load = TransformerLanguageModel.from_pretrained
    mixed = load(str(pair), "last-dpq.pt:last-full.pt", str(lm))
    (full,) = load(str(pair), "last-full.pt", str(lm)).models
    assert torch.equal(_scores(mixed.models[1]), _scores(full))


def test_flags_of_a_command_do_not_quantise_what_it_loads(pair, lm) -> None:
    """`fairseq-eval-lm --dpq-K 8 --path full.pt`: the flag is for training."""
    argv = [str(lm), "--user-dir", fsq.USER_DIR, "--path", str(pair / "last-full.pt"), "--cpu"]
    argv += ["--tokens-per-sample", "40", "--num-workers", "0", "--max-tokens", "400"]
    losses = [
        re.findall(r"Loss \(base 2\): [\d.]+", fsq.main("eval_lm", [*argv, *flags]))
        for flags in ([], ["--dpq-K", "8", "--dpq-D", "4"])
    ]
    assert losses[0] and losses[0] == losses[1]
