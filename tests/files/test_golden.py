"""Each version of the compact format, written once by helpers/make_golden.py, is read."""

from __future__ import annotations

import pytest
import torch
from fairseq import checkpoint_utils, tasks

from fairseq_dpq import CompactEmbedding
from fairseq_dpq.cli import inspect
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.reader import read_symbols
from helpers import make_golden
from helpers.make_golden import DIM, GOLDEN, N

ROWS = torch.tensor([make_golden.row(i) for i in range(N)])


VERSIONS = pytest.mark.parametrize("version", [3])


@VERSIONS
def test_the_tools_read_it(version: int) -> None:
    checkpoint = Checkpoint.load(GOLDEN / f"compact-v{version}.pt")
    record = checkpoint.dpq_record()
    assert (record.version, record.stage, record.source) == (version, "compact", "trained.pt")
    (path,) = record.tables
    module = checkpoint.form(path)
    assert module.sizes == [6, 6, 6, 2]  # unused codes were dropped
    assert torch.equal(module.dense(), ROWS)
    # By the bits, as docs/compact-format.md has it: 3 + 3 + 3 + 1 bits in 2 bytes
    codes = checkpoint.weights[f"{path}.codes"]
    assert tuple(codes.shape) == (N, 2)
    for index in (0, 2, 13, N - 1):
        want = [make_golden.code(index, group) for group in range(3)] + [index % 2]
        word = want[0] | want[1] << 3 | want[2] << 6 | want[3] << 9
        assert codes[index].tolist() == [word & 255, word >> 8]


@VERSIONS
def test_fairseq_loads_it_strictly(version: int) -> None:
    path = str(GOLDEN / f"compact-v{version}.pt")
    written = torch.load(path)["cfg"]["task"]
    assert "dpq_rotation_trick" in written  # a flag of 1.0.0; fairseq 0.12.2 refuses unknown ones
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    assert {*written} - {*state["cfg"]["task"]} == {"dpq_rotation_trick"}
    state["cfg"]["task"]["data"] = str(GOLDEN)
    task = tasks.setup_task(state["cfg"]["task"])
    models, _ = checkpoint_utils.load_model_ensemble([path], task=task, state=state)
    decoder = models[0].eval().decoder
    assert isinstance(decoder.embed_tokens, CompactEmbedding)
    with torch.no_grad():
        assert torch.equal(decoder.embed_tokens(torch.arange(N)), ROWS)
        hidden = torch.eye(DIM)
        assert torch.equal(decoder.output_layer(hidden), ROWS.t())  # tied


@VERSIONS
def test_the_exported_table(version: int) -> None:
    path = GOLDEN / f"compact-v{version}.safetensors"
    assert torch.equal(CompactEmbedding.from_file(path).dense(), ROWS)
    symbols = read_symbols(path)
    assert symbols is not None and len(symbols) == N and symbols[4].startswith("a")
    total = sum(file.stat().st_size for file in GOLDEN.iterdir() if file.is_file())
    assert total < 50_000


def test_an_older_version_is_refused_by_its_number(capsys: pytest.CaptureFixture) -> None:
    """Version 2 is that of fairseq-dpq 0.2; the files stay to show how it is refused."""
    for name in ("compact-v2.pt", "compact-v2.safetensors"):
        assert inspect.main([str(GOLDEN / name)]) == 2
        said = capsys.readouterr().err
        assert "its format is version 2, written by 'fairseq-dpq 0.2" in said
        assert "reads version 3: write the file again from its training" in said
        assert said.count("\n") == 1
