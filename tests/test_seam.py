"""A method that another package adds goes through every command without a line changed here.

`helpers/toy_package.py` has the package; it is installed as pip would, by its entry point.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers import fsq, toy_package
from helpers.plugin_runs import RUN, TRANSFORMER

pytestmark = pytest.mark.slow

TOY = ["--dpq-K", "8", "--dpq-D", "4", "--dpq-method", "toy", "--dpq-toy-step", "5"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return fsq.make_corpus(tmp_path_factory.mktemp("seam"), n_test=10)


@pytest.fixture(scope="module")
def env(tmp_path_factory) -> dict[str, str]:
    return toy_package.install(tmp_path_factory.mktemp("site"), method=toy_package.METHOD)


def train(corpus, where, env, *flags: str, updates: int = 2, ok: bool = True) -> str:
    argv = [corpus, "--user-dir", fsq.USER_DIR, "--save-dir", where, *RUN, *TRANSFORMER, *flags]
    done = fsq.run(["fairseq-train", *argv, "--max-update", str(updates)], env=env, ok=ok)
    return done.stdout + done.stderr


def hypotheses(corpus, checkpoint, env) -> list[str]:
    argv = [corpus, "--user-dir", fsq.USER_DIR, "--path", checkpoint, "--cpu", "--beam", "2"]
    done = fsq.run(["fairseq-generate", *argv, "--max-len-b", "8"], env=env)
    return re.findall(r"^H-.*$", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def trained(corpus, env, tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("run")
    log = train(corpus, where, env, *TOY)
    assert "encoder.embed_tokens: 64 x 32 -> DPQ toy K=8 D=4; compression ratio 7.3" in log
    return where / "checkpoint_last.pt"


def test_help_and_errors_know_its_option(corpus, env, tmp_path) -> None:
    shown = fsq.run(["fairseq-train", "x", "--user-dir", fsq.USER_DIR, "--help"], env=env).stdout
    words = " ".join(shown.split())
    assert "toy: how far the codes of two neighbours are apart (default: 3)" in words
    assert "toy: codes by the number of the row" in words
    log = train(corpus, tmp_path, env, *TOY, "--dpq-toy-step", "0", ok=False)
    assert "error: --dpq-toy-step 0: must be 1 or more; try 3\n" in log
    log = train(corpus, tmp_path, env, "--dpq-K", "8", "--dpq-toy-step", "5", ok=False)
    assert "--dpq-toy-step 5 has no effect with --dpq-method sx; use --dpq-method toy" in log


def test_resume_compares_its_option(corpus, env, trained) -> None:
    log = train(corpus, trained.parent, env, *TOY, updates=3)
    assert "(epoch 1 @ 2 updates)" in log
    log = train(corpus, trained.parent, env, *TOY, "--dpq-toy-step", "2", updates=4, ok=False)
    assert "--dpq-toy-step 5 in the checkpoint, 2 here" in log and "--dpq-toy-step 5)" in log


def test_compact_inspect_export_generate(corpus, env, trained, tmp_path) -> None:
    small, table = tmp_path / "compact.pt", tmp_path / "table.safetensors"
    fsq.run(["fairseq-dpq-compact", trained, small], env=env)
    for file in (trained, small):
        shown = fsq.run(["fairseq-dpq-inspect", file, "--json"], env=env).stdout
        assert '"toy"' in shown and '"K": 8' in shown, shown
        json.loads(shown)
    fsq.run(["fairseq-dpq-export", small, table], env=env)
    assert table.stat().st_size > 0
    found = hypotheses(corpus, small, env)
    assert len(found) == 10 and found == hypotheses(corpus, trained, env)


def test_without_the_package_its_checkpoint_is_refused_in_one_line(trained, tmp_path) -> None:
    done = fsq.run(["fairseq-dpq-compact", trained, tmp_path / "x.pt"], ok=False)
    line = done.stderr.strip().splitlines()[-1]
    assert "was trained by method 'toy'; this fairseq-dpq knows sx, vq, low_rank" in line
    assert "install the package that adds it" in line and "Traceback" not in done.stderr


def test_compress_train_and_save(env, tmp_path) -> None:
    code = """
        import torch
        from torch import nn
        import fairseq_dpq

        model = nn.Sequential(nn.Embedding(6000, 16), nn.Linear(16, 2))
        report = fairseq_dpq.compress(model, K=8, D=4, method="toy", trainable=True, toy_step=7)
        assert model[0].codes()[:3, 0].tolist() == [0, 7, 6], model[0].codes()[:3]
        model(torch.arange(9)).sum().backward()
        fairseq_dpq.compact(model)
        out = model(torch.arange(50))
        fairseq_dpq.save_compact(model, "model")
        other = nn.Sequential(nn.Embedding(6000, 16), nn.Linear(16, 2))
        fairseq_dpq.load_compact("model", other)
        assert torch.equal(other(torch.arange(50)), out)
        print(model[0])
    """
    source = "\n".join(line[8:] for line in code.splitlines())
    done = fsq.run(["python", "-c", source], cwd=tmp_path, env=env)
    assert "CompactEmbedding(6000, 16, K=8, D=4" in done.stdout


def test_a_broken_package_is_named_and_does_no_harm(tmp_path) -> None:
    env = toy_package.install(tmp_path, broken="raise RuntimeError('no such GPU')")
    code = "import fairseq_dpq; print(fairseq_dpq.DPQEmbedding(4, 4, D=2))"
    done = fsq.run(["python", "-c", code], env=env)
    assert "cannot load toy_dpq.broken: no such GPU" in done.stderr
    assert "method=sx" in done.stdout
