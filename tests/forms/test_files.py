"""Exported tables that are too large to be read when they are opened."""

from __future__ import annotations

import copy

import pytest
import torch

from fairseq_dpq import CompactEmbedding
from fairseq_dpq.forms import FORMS, files
from fairseq_dpq.forms.files import from_file
from fairseq_dpq.safetensors_file import ExportError, metadata
from helpers.toy_checkpoints import make_layer

N, DIM = 400_000, 16


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A table of 3.2 MB: four blocks, all of them left for later."""
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setattr("fairseq_dpq.safetensors_file.SMALL", 100_000)
    monkeypatch.setattr(files, "SMALL", 100_000)
    codes = torch.randint(0, 16, (N, 16), dtype=torch.uint8)
    form = CompactEmbedding.from_codes(codes, make_layer(d=DIM, K=16, D=16).values.detach(), DIM)
    config = {"num_embeddings": N, "embedding_dim": DIM, "padding_idx": None, **form.settings()}
    tensors = form.export_tensors()
    path = tmp_path / "table.safetensors"
    safetensors.save_file(tensors, str(path), metadata("table", config, tensors))
    return path, form


def test_rows_are_right_before_and_after_verify(large) -> None:
    path, form = large
    table = from_file(path, FORMS)
    rows = torch.tensor([0, 5, N - 1])
    assert type(table) is not CompactEmbedding and isinstance(table, CompactEmbedding)
    assert torch.equal(table(rows), form(rows))
    assert torch.equal(copy.deepcopy(from_file(path, FORMS))(rows), form(rows))
    assert torch.equal(torch.jit.script(from_file(path, FORMS))(rows), form(rows))
    table.verify()
    assert type(table) is CompactEmbedding
    assert torch.equal(table.dense(), form.dense())


def test_damage_is_found_when_its_rows_are_read(large) -> None:
    path, form = large
    data = bytearray(path.read_bytes())
    place = data.find(bytes(form.packed_codes()[N - 1000].tolist()), len(data) // 2)
    data[place] ^= 1
    path.write_bytes(data)
    table = from_file(path, FORMS)
    rows = torch.tensor([0, 5, 100])
    assert torch.equal(table(rows), form(rows))
    for read in (lambda: table(torch.tensor([N - 1000])), table.verify, table.state_dict):
        with pytest.raises(ExportError, match=r"codes do(es)? not match"):
            read()
