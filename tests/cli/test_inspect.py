"""fairseq-dpq-inspect: both forms, full checkpoints, and codes that changed."""

from __future__ import annotations

import json

import pytest
import torch

from fairseq_dpq.cli import compact, inspect
from fairseq_dpq.record import RECORD_KEY
from helpers.toy_checkpoints import PATH, make_layer, make_state, save_toy


def _facts(capsys, *argv) -> list[dict]:
    assert inspect.main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_training_and_compact_say_the_same(tmp_path, capsys) -> None:
    source, small = save_toy(tmp_path / "in.pt", make_layer(K=6)), tmp_path / "out.pt"
    assert compact.main([str(source), str(small)]) == 0
    capsys.readouterr()
    a, b = _facts(capsys, source, small)
    assert (a["form"], b["form"], b["source"]) == ("training", "compact", str(source))
    assert a["optimizer_bytes"] == 2 * 4 * 60 * 12 and b["optimizer_bytes"] == 0
    (before,), (after,) = a["embeddings"], b["embeddings"]
    assert before.pop("stored_bytes") > after["stored_bytes"] == after["compact_bytes"]
    after.pop("stored_bytes")
    assert before.pop("changed") is None
    assert after.pop("changed") == {"codes": 0.0, "symbols": 0.0}
    assert before == after


def test_share_of_codes_that_changed(tmp_path, capsys) -> None:
    """Of 60 symbols with 4 codes each, 6 get another code in group 2, and 3 also in group 0."""
    layer = make_layer(method="vq", normalize=False)
    layer.values.data[3, 5] = 1e3  # a code for nobody
    first = save_toy(tmp_path / "1.pt", layer)
    codes = layer.codes().long()
    with torch.no_grad():
        for row in range(10, 16):
            for group in (2, 0) if row < 13 else (2,):
                other = (codes[row, group] + 1) % 8
                layer.query.view(60, 4, 3)[row, group] = layer.values[group, other]
    second = save_toy(tmp_path / "2.pt", layer)
    shrunk = tmp_path / "3.pt"
    assert compact.main([str(second), str(shrunk), "--lossless-shrink"]) == 0
    capsys.readouterr()
    facts = _facts(capsys, first, second, shrunk)
    assert [f["embeddings"][0]["changed"] for f in facts] == [
        None,
        {"codes": pytest.approx(9 / 240), "symbols": pytest.approx(6 / 60)},
        None,  # renumbered
    ]
    assert inspect.main([str(first), str(second)]) == 0
    assert "3.75 %" in capsys.readouterr().out


def test_entropy_by_hand(tmp_path, capsys) -> None:
    """Half the symbols have code 0 and half code 1 in one group of two: 1 bit; else 0."""
    layer = make_layer(n=9, d=2, D=2, K=2, method="vq", normalize=False, pad=8)
    with torch.no_grad():
        layer.values.copy_(torch.tensor([[[0.0], [1.0]], [[0.0], [1.0]]]))
        layer.query.zero_()
        layer.query[:4, 0] = 1
    facts = _facts(capsys, save_toy(tmp_path / "a.pt", layer))
    assert facts[0]["embeddings"][0]["entropy_bits_per_symbol"] == pytest.approx(1.0)
    assert facts[0]["embeddings"][0]["used_codes"] == {"min": 1, "median": 2, "max": 2}


def test_full_checkpoint_and_what_it_would_shrink_to(tmp_path, capsys) -> None:
    state = make_state(make_layer())
    delattr(state["cfg"]["model"], RECORD_KEY)
    table = torch.randn(1000, 16)
    state["model"] = {
        "encoder.embed_tokens.weight": table,
        "decoder.embed_tokens.weight": table,
        "encoder.embed_positions.weight": torch.randn(50, 16),
        "decoder.output_projection.weight": table,
    }
    path = tmp_path / "full.pt"
    torch.save(state, path)
    before = path.read_bytes()
    (facts,) = _facts(capsys, path, "--dpq-K", 8, "--dpq-D", 4)
    (row,) = facts["embeddings"]
    assert (facts["form"], row["path"], row["aliases"]) == ("full", PATH, ["decoder.embed_tokens"])
    assert (row["full_bytes"], row["compact_bytes"]) == (64_000, 2000 + 512 + 32)
    assert row["formula_cr"] == pytest.approx(64_000 / 2012)
    assert inspect.main([str(path), "--dpq-D", "5"]) == 0
    assert "--dpq-D 5 does not divide embedding_dim=16; try 4 or 8" in capsys.readouterr().out
    assert path.read_bytes() == before  # nothing is written


def test_errors(tmp_path, capsys) -> None:
    assert inspect.main([str(tmp_path / "none.pt")]) == 2
    assert "fairseq-dpq-inspect: error: cannot read" in capsys.readouterr().err
