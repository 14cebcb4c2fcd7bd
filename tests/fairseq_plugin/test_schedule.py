"""A table's schedule in real trainings: with epochs, other files, a new optimiser, patience."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from fairseq_dpq.cli import compact
from fairseq_dpq.config import DPQConfigError
from helpers.plugin_runs import TRANSFORMER, last, train
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow

SX = "--dpq-K 8 --dpq-D 4 --dpq-embeddings all"
TIED = [*TRANSFORMER, "--share-decoder-input-output-embed"]
TABLE = "encoder.embed_tokens"


def schedule(folder: Path) -> list[float]:
    return last(folder)["model"][f"{TABLE}.schedule"].tolist()


@pytest.mark.parametrize("updates", [0, 1000])
def test_the_ramp_follows_the_epochs_after_a_given_warmup(corpus, tmp_path, updates) -> None:
    warmup = SX + " --dpq-warmup-updates 3"
    train(corpus, tmp_path, *TIED, "--max-epoch", "4", updates=updates, dpq=warmup)
    done, first, end = schedule(tmp_path)
    assert first == 3 and end == 3 + done // 2 < done


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory) -> Path:
    """A checkpoint in the middle of its warm-up."""
    where = tmp_path_factory.mktemp("plain")
    train(corpus, where, *TIED, updates=4, dpq=SX + " --dpq-warmup-updates 50")
    assert schedule(where) == [4, 50, 54]
    return where / "checkpoint_last.pt"


def test_another_file_brings_its_schedule(corpus, plain, tmp_path, monkeypatch) -> None:
    """--restore-file is relative to the working directory, as in fairseq."""
    monkeypatch.chdir(plain.parent.parent)
    name = os.path.relpath(plain)
    train(corpus, tmp_path / "a", *TIED, "--restore-file", name, updates=6, dpq=SX)
    assert schedule(tmp_path / "a") == [6, 50, 54]
    train(corpus, tmp_path / "b", *TIED, "--continue-once", name, updates=6, dpq=SX)
    assert schedule(tmp_path / "b") == [6, 50, 54]


def test_a_given_schedule_counts_with_a_new_optimiser(corpus, plain, tmp_path) -> None:
    given = SX + " --dpq-warmup-updates 2 --dpq-ramp-updates 3"
    (tmp_path / "resumed").mkdir()
    shutil.copy(plain, tmp_path / "resumed" / "checkpoint_last.pt")
    log = train(corpus, tmp_path / "resumed", *TIED, updates=6, dpq=given)
    assert schedule(tmp_path / "resumed") == [6, 50, 54]
    assert "--dpq-warmup-updates 2 has no effect: the checkpoint's value counts" in log
    assert "(--dpq-warmup-updates 50); --reset-optimizer takes the new one" in log

    tuned = tmp_path / "tuned"
    train(corpus, tuned, *TIED, "--finetune-from-model", str(plain), updates=6, dpq=given)
    assert schedule(tuned) == [6, 2, 5]
    none = SX + " --dpq-schedule paper"
    with pytest.raises(
        DPQConfigError, match=r"--dpq-schedule warmup in the checkpoint, paper here"
    ):
        train(corpus, tmp_path / "n", *TIED, "--finetune-from-model", str(plain), dpq=none)


def test_scores_of_the_plain_table_do_not_count(corpus, tmp_path) -> None:
    """A valid loss that is worse with codes, here two for a row, neither ends the training nor
    keeps an older best."""
    flags = [*TIED, "--max-epoch", "12", "--patience", "2"]
    coarse = "--dpq-K 2 --dpq-D 1 --dpq-embeddings all --dpq-warmup-updates 30"
    log = train(corpus, tmp_path, *flags, updates=0, dpq=coarse)
    losses = [float(x) for x in re.findall(r"valid \| epoch \d+ \| valid on .* loss ([\d.]+)", log)]
    assert min(losses[:4]) < min(losses[5:]), losses
    best = load(tmp_path / "checkpoint_best.pt")
    now, first, _ = best["model"][f"{TABLE}.schedule"].tolist()
    assert now >= first == 30


def test_patience_waits_for_codes(corpus, tmp_path) -> None:
    """The plain table learns nothing, and its 30 updates are five epochs."""
    flags = [*TIED, "--max-epoch", "12", "--patience", "1", "--lr", "0"]
    log = train(corpus, tmp_path, *flags, updates=0, dpq=SX + " --dpq-warmup-updates 30")
    assert len(re.findall(r"valid \| epoch \d+ \| valid on", log)) > 5


def test_averages_of_a_warmup(corpus, plain, tmp_path, capsys) -> None:
    """An average over the end of the warm-up is refused; the EMA keeps the model's own count."""
    ema = ["--store-ema", "--ema-decay", "0.99"]
    short = SX + " --dpq-warmup-updates 3 --dpq-ramp-updates 3"
    train(corpus, tmp_path, *TIED, *ema, updates=8, dpq=short)
    done = tmp_path / "checkpoint_last.pt"
    out = tmp_path / "out.pt"
    assert compact.main([str(done), str(out), "--ema"]) == 0
    early = tmp_path / "early"
    train(corpus, early, *TIED, updates=2, dpq=short)
    files = [str(early / "checkpoint_last.pt"), str(done), str(tmp_path / "mean.pt")]
    assert compact.main([*files, "--average"]) == 2
    assert "is still in its warm-up, at update 2 of 3" in capsys.readouterr().err
