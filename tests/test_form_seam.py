"""A form of another package: found through its entry point, and used by every command and function
without a line changed in this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import fsq
from helpers.tool_runs import TF, train

pytestmark = pytest.mark.slow

# One bit for each number: its sign, times the mean size of its row (or of the whole table).
PACKAGE = """
import torch
from fairseq_dpq import Form, FormOption, Layout, register_form


@register_form
class SignEmbedding(Form):
    kind = "signs"
    signature_tensor = "signs"
    options = (FormOption("by_row", "--one-size", True, "one size for all rows"),)
    setting_types = {"by_row": bool}

    def __init__(self, n, d, padding_idx=None, *, by_row=True, dtype=None, device=None):
        super().__init__()
        self._set_size(n, d, padding_idx)
        self.by_row = by_row
        self.register_buffer("signs", torch.zeros(n, d, dtype=torch.uint8, device=device))
        sizes = torch.zeros(n if by_row else 1, 1, dtype=dtype, device=device)
        self.register_buffer("size", sizes)

    @classmethod
    def from_table(cls, table, padding_idx=None, *, seed=0, progress=None, by_row=True):
        form = cls(*table.shape, padding_idx, by_row=by_row)
        form.signs.copy_(table > 0)
        size = table.float().abs()
        form.size.copy_(size.mean(1, keepdim=True) if by_row else size.mean().view(1, 1))
        return form

    @classmethod
    def from_learned(cls, tensors, request):
        values, codes = tensors["values"], tensors["codes"].long()
        rows = values[torch.arange(codes.shape[1]), codes].flatten(1)
        return cls.from_table(rows, request.padding_idx).to(request.dtype)

    @classmethod
    def layout(cls, n, d, settings, found):
        size = Layout((n if settings["by_row"] else 1, 1))
        return {"signs": Layout((n, d), (torch.uint8,)), "size": size}

    def forward(self, ids):
        sign = self.signs[ids].to(self.size.dtype) * 2 - 1
        rows = sign * (self.size[ids] if self.by_row else self.size[0])
        pad = -1 if self.padding_idx is None else self.padding_idx
        return rows.masked_fill((ids == pad).unsqueeze(-1), 0.0)

    def settings(self):
        return {"by_row": self.by_row}

    def formula_bits(self):
        return self.signs.numel() + 32 * self.size.numel()

    @property
    def saved_nbytes(self):
        return self.signs.numel() + self.size.numel() * self.size.element_size()

    def bits_per_symbol(self):
        return self.embedding_dim + 32 * self.by_row

    def describe(self):
        return "by row" if self.by_row else "one size"
"""

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
    folder = tmp_path_factory.mktemp("site")
    (folder / "toyforms.py").write_text(PACKAGE)
    info = folder / "toyforms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyforms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fairseq_dpq]\ntoyforms = toyforms\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


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
    assert seen["compact_bytes"] == seen["num_embeddings"] * seen["embedding_dim"] + 4
    table = torch.load(full, weights_only=False)["model"]["encoder.embed_tokens.weight"]
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
    assert said.split() == ["signs", "by", "row", str(300 * 8 + 300 * 4)]


def test_without_the_package_the_kind_is_named(outside, full, tmp_path, capsys) -> None:
    from fairseq_dpq.cli import inspect

    small = tmp_path / "small.pt"
    tool(outside, "quantize", full, small, "--form", "signs")
    assert inspect.main([str(small)]) == 2
    assert "stores a table as 'signs'; this fairseq-dpq knows" in capsys.readouterr().err
