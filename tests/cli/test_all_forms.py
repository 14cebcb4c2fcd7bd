"""Every form and the low-rank method through all commands: train, quantise or compact, generate,
inspect, export. fairseq computes with a form what it computes with its dense table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import compact, export, inspect, quantize
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.reader import read_form
from fairseq_dpq.forms import FORMS
from helpers.tool_runs import TF, score, train
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow

ENCODER, DECODER = "encoder.embed_tokens", "decoder.embed_tokens"
FLAGS = {
    "product_codes": ["--dpq-K", "4", "--dpq-D", "8"],
    "scalar": ["--form", "scalar", "--bits", "3"],
    "low_rank": ["--form", "low_rank", "--dpq-rank", "6"],
    "tiers": ["--form", "tiers", "--ratio", "4"],
    "additive_codes": [
        "--form",
        "additive_codes",
        "--dpq-K",
        "4",
        "--dpq-D",
        "8",
        "--steps",
        "200",
    ],
}
# Squared; the tables are almost random. Half a bit for each number, 3 bits, rank 6 of 32.
LARGEST_ERROR = {"product_codes": 0.6, "scalar": 0.035, "low_rank": 0.65, "additive_codes": 0.6}
LARGEST_ERROR["tiers"] = 0.2  # by the order of ids


@pytest.fixture(scope="module")
def full(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    return train(corpus, folder, f"{TF} --share-decoder-input-output-embed")


def _with_dense_tables(full: Path, small: Path, target: Path) -> dict[str, torch.Tensor]:
    """A full checkpoint with the tables that the forms of `small` stand for."""
    checkpoint, state = Checkpoint.load(small), load(full)
    tables = {path: checkpoint.form(path).dense() for path in checkpoint.dpq_record().tables}
    for path, table in tables.items():
        state["model"][f"{path}.weight"] = table
    state["model"]["decoder.output_projection.weight"] = tables[DECODER]
    torch.save(state, target)
    return tables


def _best(data: Path, path: Path) -> tuple[list[str], list[float]]:
    """Translations and their scores; the sums of a matrix product may differ in the last bit."""
    lines = [line.split("\t") for line in score("generate", data, path, beam=1)]
    best = [line for line in lines if line[0].startswith("H-")]
    return [line[2] for line in best], [float(line[1]) for line in best]


def _json(capsys, tool, *argv: object):
    capsys.readouterr()
    assert tool.main([*map(str, argv), "--json", "--debug"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_forms_are_here() -> None:
    assert set(FLAGS) == set(FORMS)


@pytest.mark.parametrize("kind", FLAGS)
def test_quantize_generate_inspect_export(kind: str, corpus, full, tmp_path, capsys) -> None:
    small, dense = tmp_path / "small.pt", tmp_path / "dense.pt"
    facts = _json(capsys, quantize, full, small, "--embeddings", "all", *FLAGS[kind])
    tables = _with_dense_tables(full, small, dense)
    original = load(full)["model"]
    for row in facts["embeddings"]:
        table = original[f"{row['path']}.weight"]
        error = (tables[row["path"]] - table).pow(2).sum() / table.pow(2).sum()
        assert row["relative_error"] == pytest.approx(float(error), rel=1e-3)
        assert 0.01 < row["relative_error"] < LARGEST_ERROR[kind]
    (words, scores), (same_words, same_scores) = (_best(corpus, path) for path in (small, dense))
    assert words == same_words and scores == pytest.approx(same_scores, abs=1e-4)
    assert scores != pytest.approx(_best(corpus, full)[1], abs=1e-4)

    record = Checkpoint.load(small).dpq_record()
    assert {table.form["kind"] for table in record.tables.values()} == {kind}
    (seen,) = _json(capsys, inspect, small)
    state = load(small)["model"]
    for row in seen["embeddings"]:
        own = [t for key, t in state.items() if key.startswith(row["path"] + ".")]
        assert row["compact_bytes"] == sum(t.numel() * t.element_size() for t in own)

    file = tmp_path / "table.safetensors"
    assert export.main([str(small), str(file), "--table", ENCODER]) == 0
    assert torch.equal(read_form(file, FORMS).dense(), tables[ENCODER])


def test_low_rank_from_training_to_translation(corpus, tmp_path, capsys) -> None:
    flags = f"{TF} --share-decoder-input-output-embed --dpq-embeddings all"
    path = train(corpus, tmp_path / "ck", f"{flags} --dpq-method low_rank --dpq-rank 6")
    small = tmp_path / "small.pt"
    facts = _json(capsys, compact, path, small)
    rows = {row["path"]: row for row in facts["embeddings"]}
    n, d = (rows[ENCODER][key] for key in ("num_embeddings", "embedding_dim"))
    assert rows[ENCODER]["compact_bytes"] == 4 * 6 * (n + d)
    state = load(path)["model"]
    assert state[f"{ENCODER}.query"].shape == (n, 6) and f"{ENCODER}.keys" not in state
    assert score("generate", corpus, small) == score("generate", corpus, path)
