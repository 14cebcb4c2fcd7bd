"""recipes/: the commands that the scripts print, compared with a list of all of them, and what it
takes to add a recipe."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.datasets.__main__ import MODULES, main, prepare

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = (ROOT / "tests" / "golden_commands.txt").read_text(encoding="utf-8")
CASES = re.findall(r"^\$ (.*)\n((?:.*\n)*?)rc=(\d)$", GOLDEN, re.MULTILINE)
SCRIPTS = sorted({re.findall(r"scripts/(\S+)", case[0])[0] for case in CASES})
LAUNCH = ("WORLD_SIZE", "RANK", "WORKERS", "BATCH", "MICRO", "DATA", "SAVE_DIR", "OUT", "SHARE")
LAUNCH += ("BERT", "PRETRAINED")


def _run(root: Path, command: str, **env: str) -> tuple[int, str]:
    """Exit code and output of a line as one would type it, from `root`."""
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCH and "SLURM" not in k}
    words = shlex.split(command)
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        env[name] = value
    done = subprocess.run(
        ["sh", *words],
        cwd=root,
        env={**clean, "PYTHON": "false", "DRY_RUN": "1", **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_golden_list_has_every_recipe_with_every_method() -> None:
    listed = {"_".join(case[0].split(".sh ")[1].split()[:2]) for case in CASES}
    recipes = [path.stem for path in (ROOT / "recipes").glob("*.conf")]
    assert len(recipes) >= 12
    for recipe in recipes:
        _, output = _run(ROOT, f"scripts/train.sh {recipe} unknown --cpu")
        methods = re.split(", | or ", output.strip().partition("; choose ")[2])
        assert methods[0] == "full" and len(methods) > 1, output
        for method in methods:
            assert f"{recipe}_{method}" in listed


@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_are_those_of_the_golden_list(script: str) -> None:
    for command, output, code in CASES:
        if f"scripts/{script} " not in command:
            continue
        assert _run(ROOT, command) == (int(code), output), command


def test_language_models_are_scored_by_perplexity() -> None:
    code, output = _run(ROOT, "scripts/score.sh ptb_small c.pt --gen-subset valid")
    assert code == 0
    assert output == (
        "fairseq-eval-lm data-bin/ptb --user-dir fairseq_dpq --path c.pt --gen-subset valid "
        "--task stateful_lm --gen-subset valid\n"
    )


TOY = """
data=toy
unit=blocks batch=6
flags="--arch toy_lm @method --note 'two words' @batch --lr 1"
methods="
low_rank  --dpq-method low_rank --dpq-rank 8 --dpq-share-subspaces ... --seed 3
"
needs=dict.txt
metric=perplexity
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of scripts and recipes that a test may add to."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    return tmp_path


def test_recipe_is_one_file(checkout: Path) -> None:
    (checkout / "recipes" / "toy.conf").write_text(TOY)
    prefix = (
        "fairseq-train data-bin/toy --user-dir fairseq_dpq --save-dir checkpoints/toy_{} "
        "--no-epoch-checkpoints --log-format simple --arch toy_lm"
    )
    assert _run(checkout, "WORKERS=2 scripts/train.sh toy full") == (
        0,
        prefix.format("full") + " --note 'two words' --batch-size 3 --lr 1"
        " --distributed-world-size 2\n",
    )
    assert _run(checkout, "SHARE=0 scripts/train.sh toy low_rank --cpu --lr 2") == (
        0,
        prefix.format("low_rank") + " --dpq-method low_rank --dpq-rank 8 --note 'two words'"
        " --batch-size 6 --lr 1 --seed 3 --cpu --lr 2\n",
    )
    code, output = _run(checkout, "scripts/train.sh toy sx --cpu")
    assert (code, output) == (
        2,
        "train.sh: METHOD 'sx' is unknown to recipe toy; choose full or low_rank\n",
    )
    code, output = _run(checkout, "WORKERS=4 scripts/train.sh toy full")
    assert output == "train.sh: 4 workers do not divide 6 blocks; set WORKERS to 1, 2, 3 or 6\n"
    code, output = _run(checkout, "BATCH=8 WORKERS=4 scripts/train.sh toy full")
    assert " --batch-size 2 " in output
    code, output = _run(checkout, "scripts/train.sh toy full --cpu", DRY_RUN="0")
    assert (code, output) == (
        2,
        "train.sh: no dict.txt in DATA 'data-bin/toy'; run: scripts/prepare.sh toy\n",
    )


def test_each_recipe_scores_its_own_split(checkout: Path) -> None:
    """Where the held-out part has chosen the checkpoint, the test set is scored."""
    for recipe, split in (
        ("ag_news", "test"),
        ("csv_files", "test"),
        ("glue_cola", "valid"),
        ("bert_small", "valid"),
        ("squad1", "valid"),
    ):
        flag = "--subset" if recipe == "squad1" else "--valid-subset"
        words = _run(ROOT, f"scripts/score.sh {recipe} c.pt")[1].split()
        assert words[words.index(flag) + 1] == split
    data = checkout / "data-bin" / "glue_cola" / "input0"
    data.mkdir(parents=True)
    (data / "dict.txt").touch()
    (checkout / "c.pt").write_bytes(b"PK")
    (checkout / "text").write_text("not a checkpoint")
    code, output = _run(checkout, "scripts/score.sh glue_cola text --cpu", DRY_RUN="0")
    assert (code, output) == (2, "score.sh: CHECKPOINT 'text' is not a PyTorch checkpoint\n")
    command = "scripts/score.sh glue_cola c.pt --cpu --valid-subset test"
    assert _run(checkout, command, DRY_RUN="0") == (
        2,
        "score.sh: no split 'test' in DATA 'data-bin/glue_cola'; choose another one by "
        "--valid-subset\n",
    )
    code, output = _run(checkout, "BERT=small scripts/train.sh glue_cola sx --cpu", DRY_RUN="0")
    assert code == 2 and output.startswith(
        "train.sh: no file PRETRAINED 'checkpoints/bert_small_sx/checkpoint_best.pt'; run: "
        "scripts/train.sh bert_small sx"
    )
    # Not where another start was chosen, nor where training goes on. PYTHON is `false` here.
    command = "BERT=small scripts/train.sh glue_cola sx --cpu"
    assert _run(checkout, f"{command} --restore-file c.pt", DRY_RUN="0")[0] == 1
    own = checkout / "checkpoints" / "glue_cola_small_sx"
    own.mkdir(parents=True)
    (own / "checkpoint_last.pt").write_bytes(b"PK")
    assert _run(checkout, command, DRY_RUN="0")[0] == 1


LOGITS = """
import torch
kept = []
for step in range(40):
    one, two, three = (torch.ones(400, 33280) for _ in range(3))
    kept.append(torch.zeros(2000))
    del one
    kept.append(torch.zeros(300))
    del three, two
print(int(open("/proc/self/statm").read().split()[1]) * 4096)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_settings_of_the_scripts(tmp_path: Path) -> None:
    """Logits of WikiText-2 between small tensors that stay, as an evaluation makes them."""
    (tmp_path / "logits.py").write_text(LOGITS)
    line = '. scripts/launch.sh; exec "$0" "$1"'
    clean = {k: v for k, v in os.environ.items() if "MALLOC" not in k}
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, str(tmp_path / "logits.py")],
        cwd=ROOT,
        env=clean,
        text=True,
        capture_output=True,
        check=True,
    )
    assert int(done.stdout) < 1e9


@pytest.mark.parametrize(
    ("old", "new", "command", "message"),
    [
        ("@batch", "", "train.sh toy full --cpu", "flags must hold @method, then @batch"),
        ("perplexity", "rouge", "score.sh toy a.pt", "metric 'rouge' is none of bleu"),
    ],
)
def test_faults_of_a_recipe(checkout: Path, old: str, new: str, command: str, message: str) -> None:
    (checkout / "recipes" / "toy.conf").write_text(TOY.replace(old, new))
    code, output = _run(checkout, f"scripts/{command}")
    assert code == 2
    assert output.startswith(f"{command.split()[0]}: recipes/toy.conf: {message}")


@pytest.mark.parametrize("name", ["", "../recipes/ptb_small", "x y", "nothing"])
def test_unknown_recipe(name: str) -> None:
    code, output = _run(ROOT, f"scripts/train.sh '{name}' full --cpu")
    assert code == 2
    assert output.startswith(f"train.sh: RECIPE '{name}' is unknown; choose ")
    assert " iwslt15-vi-en, " in output and " wmt19" in output and " or " in output


def test_every_recipe_has_its_data_set() -> None:
    parts = [path.read_text() for path in (ROOT / "recipes").iterdir()]
    names = {name for text in parts for name in re.findall(r"^data=(\w+)$", text, re.MULTILINE)}
    assert len(names) > 15 and names <= set(MODULES)


def test_prepare_knows_every_name_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`scripts/prepare\.sh (\w+)", page)) - {"NAME"}
    names |= {f"glue{end}" for end in re.findall(r"`(_\w+)`", page)} | {"squad2"}
    assert names == set(MODULES)
    for name in sorted(names):
        with pytest.raises(SystemExit) as end:
            prepare(name, ["--help"])
        assert end.value.code == 0 and f"usage: prepare.sh {name} " in capsys.readouterr().out


def test_prepare_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = _run(ROOT, "scripts/prepare.sh ptb --force", PYTHON="echo")
    assert (code, output.splitlines()[-1]) == (0, "-m experiments.datasets ptb --force")
    for words in (["archives"], ["../ptb"]):
        assert main(words) == 2
        message, _, names = capsys.readouterr().err.partition("; choose one of: ")
        assert message == f"prepare.sh: NAME {words[0]!r} is unknown"
        assert set(names.strip().split(", ")) == set(MODULES)
