"""A form of another package, the example of CONTRIBUTING.md: found through its entry point, and
used by every command and function without a line changed in this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import fsq, toy_package
from helpers.tool_runs import TF, train
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow

ANY_MODEL = """
import sys, torch
from fairseq_dpq import compress, load_compact, save_compact

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 2))
table = model[0].weight.detach().clone()
report = compress(model, method="signs", min_rows=100)
want = table.sign() * table.abs().mean(1, keepdim=True)
assert torch.equal(model[0](torch.arange(300)), want)
save_compact(model, sys.argv[1])
other = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 2))
ids = torch.tensor([3, 5])
assert torch.equal(load_compact(sys.argv[1], other)(ids), model(ids))
print(report.tables[0].description, report.tables[0].after)
"""

MODEL = """
import sys, torch
import fairseq_dpq
from fairseq import checkpoint_utils

(model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([sys.argv[1]])
table = model.encoder.embed_tokens
print(type(table).__name__, table.kind)
torch.save(table(torch.arange(table.num_embeddings)).detach(), sys.argv[2])
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that has the other package installed."""
    installed = toy_package.install(tmp_path_factory.mktemp("site"), forms=toy_package.FORM)
    path = os.pathsep.join([installed["PYTHONPATH"], *sys.path])
    return {**os.environ, "PYTHONPATH": path}


def run(env: dict[str, str], *command: object) -> str:
    words = [sys.executable, "-W", "ignore", *map(str, command)]
    done = subprocess.run(words, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool(env: dict[str, str], name: str, *arguments: object) -> str:
    return run(env, "-m", f"fairseq_dpq.cli.{name}", *arguments)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return fsq.make_corpus(tmp_path_factory.mktemp("pair"), n_lines=80, n_valid=16, n_test=17)


@pytest.fixture(scope="module")
def full(corpus, tmp_path_factory) -> Path:
    """A checkpoint without DPQ."""
    return train(corpus, tmp_path_factory.mktemp("full"), TF)


def test_quantize_inspect_export_and_models(outside, full, tmp_path) -> None:
    small, rows = tmp_path / "small.pt", tmp_path / "rows.pt"
    flags = ["--form", "signs", "--one-size", "--embeddings", "encoder.embed_tokens"]
    (made,) = json.loads(tool(outside, "quantize", full, small, *flags, "--json"))["embeddings"]
    (seen,) = json.loads(tool(outside, "inspect", small, "--json"))[0]["embeddings"]
    assert made["form"] == seen["form"] == "signs" and seen["description"] == "signs one size"
    assert seen["compact_bytes"] == seen["num_embeddings"] * seen["embedding_dim"] // 8 + 4
    table = load(full)["model"]["encoder.embed_tokens.weight"]
    assert run(outside, "-c", MODEL, small, rows).split() == ["FairseqSignEmbedding", "signs"]
    want = table.sign() * table.abs().mean()
    want[1] = 0
    torch.testing.assert_close(torch.load(rows), want, rtol=1e-5, atol=1e-7)
    exported = tmp_path / "table.safetensors"
    tool(outside, "export", small, exported, "--no-symbols")
    assert "signs one size" in tool(outside, "inspect", exported)


def test_generate(outside, corpus, full, tmp_path) -> None:
    small = tmp_path / "small.pt"
    tool(outside, "quantize", full, small, "--form", "signs", "--embeddings", "all")
    code = "import sys; from fairseq_cli.generate import cli_main; cli_main()"
    said = run(
        *(outside, "-c", code, corpus, "--user-dir", fsq.USER_DIR, "--path", small),
        *("--beam", 2, "--cpu", "--max-len-b", 5, "--gen-subset", "valid"),
    )
    assert "Generate valid with beam=2" in said and "\nH-0\t" in said


def test_compress_and_save_compact(outside, tmp_path) -> None:
    said = run(outside, "-c", ANY_MODEL, tmp_path / "model")
    assert said.split() == ["signs", "by", "row", str(300 + 300 * 4)]


def test_the_help_lists_the_form(outside) -> None:
    shown = run(outside, "-c", "from fairseq_dpq.cli import start; start.quantize(['--help'])")
    assert "--form signs:" in shown and "one size for all rows" in shown


@pytest.mark.parametrize("source", [toy_package.METHOD, toy_package.FORM], ids=["method", "form"])
def test_a_class_that_lacks_something_is_refused_in_one_line(source: str) -> None:
    code = source.replace("def codes", "def other").replace("def settings", "def other")
    code = code.replace("    summary", "    words").replace("    kind", "    sort")
    with pytest.raises(TypeError, match=r"lacks (summary, codes|kind)$"):
        exec(code, {"__name__": __name__})


def test_without_the_package_the_kind_is_named(outside, full, tmp_path, capsys) -> None:
    from fairseq_dpq.cli import inspect

    small = tmp_path / "small.pt"
    tool(outside, "quantize", full, small, "--form", "signs")
    assert inspect.main([str(small)]) == 2
    assert "stores a table as 'signs'; this fairseq-dpq knows" in capsys.readouterr().err
