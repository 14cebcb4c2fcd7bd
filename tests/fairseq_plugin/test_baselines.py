"""The baselines through the real commands: train, resume in the middle bit for bit, compact, the
same perplexity; files that do not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import compact, export, quantize
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.configs import read_record
from helpers import fsq
from helpers.plugin_runs import LM, last, train

pytestmark = pytest.mark.slow

TABLE = "decoder.embed_tokens"
TIED = [*LM, "--share-decoder-input-output-embed"]
SIZE = "--dpq-K 8 --dpq-D 5 --dpq-code-width 12"
BASELINES = {
    "random": "--dpq-K 8 --dpq-D 4 --dpq-method random_codes",
    "chen18": f"{SIZE} --dpq-method kd_codes",
    "chen18+": f"{SIZE} --dpq-method kd_codes --dpq-distill-from @full --dpq-distill-weight 10",
    "shu17": f"{SIZE} --dpq-method fixed_codes --dpq-codes @codes",
    "low_rank": "--dpq-method low_rank --dpq-rank 6",
}


@pytest.fixture(scope="module")
def made(lm, tmp_path_factory) -> dict[str, Path]:
    """A trained full checkpoint, and the additive codes that were learned from its table."""
    folder = tmp_path_factory.mktemp("full")
    train(lm, folder, *TIED, updates=3)
    full = folder / "checkpoint_last.pt"
    small, codes = folder / "small.pt", folder / "codes.safetensors"
    argv = [full, small, "--form", "additive_codes", "--dpq-K", "8", "--dpq-D", "5"]
    argv += ["--steps", "30", "--dpq-embeddings", "all"]
    assert quantize.main([*map(str, argv), "--debug"]) == 0
    assert export.main([str(small), str(codes), "--debug"]) == 0
    return {"@full": full, "@codes": codes}


def flags(name: str, made: dict[str, Path]) -> str:
    text = BASELINES[name]
    for mark, path in made.items():
        text = text.replace(mark, str(path))
    return text + " --dpq-embeddings all"


def perplexity(data: Path, path: Path) -> str:
    argv = [data, "--user-dir", fsq.USER_DIR, "--path", path, "--cpu", "--tokens-per-sample", "40"]
    found = re.findall(r"Loss \(base 2\): .*", fsq.main("eval_lm", list(map(str, argv))))
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", BASELINES)
def test_train_resume_compact_score(name: str, lm, made, tmp_path, capsys) -> None:
    dpq = flags(name, made)
    whole = train(lm, tmp_path / "whole", *TIED, updates=6, dpq=dpq)
    train(lm, tmp_path / "parts", *TIED, updates=3, dpq=dpq)
    resumed = train(lm, tmp_path / "parts", *TIED, updates=6, dpq=dpq)
    assert "(epoch 1 @ 3 updates)" in resumed
    a, b = last(tmp_path / "whole")["model"], last(tmp_path / "parts")["model"]
    assert a.keys() == b.keys()
    for key, tensor in fsq.learned(a).items():
        assert torch.equal(tensor, b[key]), key
    losses = fsq.logged(whole, r"train_inner \| epoch.* loss")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.02
    assert ("dpq_regularizer=" in whole) == (name == "chen18+")

    trained, small = tmp_path / "whole" / "checkpoint_last.pt", tmp_path / "compact.pt"
    assert compact.main([str(trained), str(small), "--debug"]) == 0
    assert "verified" in capsys.readouterr().out
    assert perplexity(lm, small) == perplexity(lm, trained)
    half = ["--values-dtype", "float16"]
    assert compact.main([str(trained), str(tmp_path / "half.pt"), *half, "--debug"]) == 0
    table = read_record(last(tmp_path / "whole")["cfg"]["model"]).tables[TABLE]
    assert table.tied == ["decoder.output_projection"]


def test_codes_and_guide_are_those_of_the_files(lm, made, tmp_path) -> None:
    train(lm, tmp_path / "a", *TIED, updates=1, dpq=flags("chen18+", made))
    full = last(made["@full"].parent)["model"][f"{TABLE}.weight"]
    assert torch.equal(last(tmp_path / "a")["model"][f"{TABLE}.guide"], full)
    # The files are not needed any more: the checkpoint has what was in them.
    dpq = flags("chen18+", {**made, "@full": made["@full"].with_name("moved.pt")})
    with pytest.raises(DPQConfigError, match=r"embed_tokens: there is no checkpoint .*moved\.pt"):
        train(lm, tmp_path / "b", *TIED, updates=1, dpq=dpq)
    without = flags("chen18", made) + " --dpq-distill-weight 10"
    train(lm, tmp_path / "a", *TIED, updates=2, dpq=without)
    after = last(tmp_path / "a")
    assert after["optimizer_history"][-1]["num_updates"] == 2
    assert torch.equal(after["model"][f"{TABLE}.guide"], full)
    with pytest.raises(DPQConfigError, match="method fixed_codes needs a file of codes"):
        train(lm, tmp_path / "c", *TIED, updates=1, dpq=f"{SIZE} --dpq-method fixed_codes")


def test_fine_tuning_starts_from_the_full_table(lm, made, tmp_path) -> None:
    flag = ["--finetune-from-model", str(made["@full"])]
    text = train(lm, tmp_path / "r", *TIED, *flag, updates=1, dpq=flags("random", made))
    assert f"{TABLE}: k-means of the full table in the checkpoint is the start" in text


def test_fine_tuning_keeps_what_came_from_files(lm, made, tmp_path) -> None:
    flag = ["--finetune-from-model", str(made["@full"])]
    full = last(made["@full"].parent)["model"][f"{TABLE}.weight"]
    train(lm, tmp_path / "kd", *TIED, *flag, updates=1, dpq=flags("chen18+", made))
    assert torch.equal(last(tmp_path / "kd")["model"][f"{TABLE}.guide"], full)
    train(lm, tmp_path / "scratch", *TIED, updates=1, dpq=flags("shu17", made))
    train(lm, tmp_path / "tuned", *TIED, *flag, updates=1, dpq=flags("shu17", made))
    scratch, tuned = (last(tmp_path / name)["model"] for name in ("scratch", "tuned"))
    assert torch.equal(tuned[f"{TABLE}.query"], scratch[f"{TABLE}.query"])
