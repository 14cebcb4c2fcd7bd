"""fairseq-dpq-inspect: both forms, full checkpoints, and codes that changed."""

from __future__ import annotations

import json

import pytest
import torch

from fairseq_dpq.cli import compact, export, inspect
from fairseq_dpq.files.record import RECORD_KEY
from helpers.toy_checkpoints import PATH, load, make_layer, make_state, save_toy


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
    assert a["sizes"] == b["sizes"]
    assert before.pop("stored_bytes") > after["stored_bytes"] == after["compact_bytes"]
    after.pop("stored_bytes")
    assert before.pop("changed") is None
    assert after.pop("changed") == {"codes": 0.0, "symbols": 0.0, "bits": 0.0}
    assert before == after


def test_share_of_codes_that_changed(tmp_path, capsys) -> None:
    """Of 60 symbols with 4 codes each, 6 get another code in group 2, and 3 also in group 0."""
    layer = make_layer(method="vq", schedule="warmup")
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
    start, changed, renumbered = (f["embeddings"][0]["changed"] for f in facts)
    assert start is None and renumbered is None
    assert (changed["codes"], changed["symbols"]) == (9 / 240, 6 / 60)
    assert inspect.main([str(first), str(second)]) == 0
    assert "3.75 %" in capsys.readouterr().out


def test_entropy_by_hand(tmp_path, capsys) -> None:
    """Half the symbols have code 0 and half code 1 in one group of two: 1 bit; else 0."""
    layer = make_layer(n=9, d=2, D=2, K=2, method="vq", schedule="warmup", pad=8)
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
    assert (row["full_bytes"], row["compact_bytes"]) == (64_000, 2000 + 512)
    assert row["formula_cr"] == pytest.approx(64_000 / 2012)
    assert inspect.main([str(path), "--dpq-D", "5"]) == 0
    assert "--dpq-D 5 does not divide embedding_dim=16; try 4 or 8" in capsys.readouterr().out
    assert path.read_bytes() == before  # nothing is written


def test_three_lines_and_what_the_others_would_bring(tmp_path, capsys) -> None:
    """A table of 1000 x 16 becomes 2,512 bytes; another one and an output layer stay full."""
    source = save_toy(tmp_path / "in.pt", make_layer(n=1000, d=16, K=8, D=4))
    state = load(source)
    state["model"]["decoder.out.embed_tokens.weight"] = torch.ones(1000, 16)
    state["model"]["decoder.other.output_projection.weight"] = torch.ones(1000, 16)
    state["model"]["decoder.small.output_projection.weight"] = torch.ones(30, 16)
    torch.save(state, source)
    assert inspect.main([str(source)]) == 0
    rest = 836 + 1920 + 2 * 64_000
    full, small = 64_000 + rest, 2512 + rest
    with_table = small - 64_000 + 2512
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("embeddings "))
    assert lines[at : at + 6] == [
        f"embeddings   64,000 ->   2,512 bytes, 25.48x smaller ({6_400_000 / full:.1f} % of the "
        "model)",
        f"model       {full:,} -> {small:,} bytes, {full / small:.2f}x smaller (without optimiser "
        "state)",
        f"file        {source.stat().st_size:,} bytes (128,000 of them optimiser state)",
        "(embeddings and model as they would be once compact)",
        f"decoder.out.embed_tokens.weight stays full ({6_400_000 / full:.1f} % of the model); with "
        f"--dpq-embeddings all the model would be {full / with_table:.2f}x smaller",
        f"decoder.other.output_projection.weight stays full ({6_400_000 / full:.1f} % of the "
        "model); with --share-decoder-input-output-embed the model would be "
        f"{full / (with_table - 64_000):.2f}x smaller",
    ]


def test_several_files_make_one_table_of_100_columns(tmp_path, capsys) -> None:
    folder = tmp_path / ("a folder with a long name" * 4)
    folder.mkdir()
    layer = make_layer(n=1000, d=16, K=8, D=4)
    paths = [save_toy(folder / f"checkpoint_best_{i}_of_a_long_run.pt", layer) for i in (1, 2)]
    small = folder / "small.pt"
    assert compact.main([str(paths[0]), str(small)]) == 0
    paths += [small, save_toy(folder / "last.pt", layer)]
    capsys.readouterr()
    assert inspect.main(list(map(str, paths))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    head = lines[0].split()
    assert head[:2] == ["file", "embedding"] and head[-1] == "changed"
    rows = [line.split() for line in lines[1:5]]
    assert [row[0][-12:] for row in rows] == ["_long_run.pt"] * 2 + ["small.pt", "last.pt"]
    assert [row[1] for row in rows] == ["encoder"] * 4
    assert [row[5:7] for row in rows] == [["2,512", "25.48"]] * 4
    sizes = [line.split() for line in lines[6:11]]
    assert sizes[0] == ["file", "form", "embeddings", "ratio", "model", "ratio", "file", "bytes"]
    assert sizes[3][1:] == [
        *("compact", "2,512", "25.48", "3,348", "19.37", f"{small.stat().st_size:,}")
    ]


def test_changed_only_within_one_run(tmp_path, capsys) -> None:
    layer = make_layer()
    paths = [save_toy(tmp_path / f"{i}.pt", layer) for i in range(3)]
    for path, seed in zip(paths, (1, 1, 2)):
        state = load(path)
        state["cfg"]["common"] = {"seed": seed}
        torch.save(state, path)
    facts = _facts(capsys, *paths)
    changed = [f["embeddings"][0]["changed"] for f in facts]
    assert changed == [None, {"codes": 0.0, "symbols": 0.0, "bits": 0.0}, None]
    assert inspect.main(list(map(str, paths))) == 0
    assert "changed: only between checkpoints of one run" in capsys.readouterr().out
    assert inspect.main(list(map(str, paths[:2]))) == 0
    assert "one run" not in capsys.readouterr().out


def test_an_exported_table(tmp_path, capsys) -> None:
    layer = make_layer(n=1000, d=16, K=8, D=4)
    source, table = save_toy(tmp_path / "in.pt", layer), tmp_path / "table.safetensors"
    assert export.main([str(source), str(table), "--no-symbols"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{table}: {PATH}, 1000 x 16",
        "embeddings  64,000 -> 2,512 bytes, 25.48x smaller",
        f"file         {table.stat().st_size:,} bytes",
    ]
    full, exported = _facts(capsys, source, table)
    (row,), (want,) = exported["embeddings"], full["embeddings"]
    assert (exported["form"], row["path"]) == ("exported", PATH)
    for name in ("num_embeddings", "compact_bytes", "used_codes", "entropy_bits_per_symbol"):
        assert row[name] == want[name]
    assert inspect.main([str(table)]) == 0
    text = capsys.readouterr().out
    assert "embeddings  64,000 -> 2,512 bytes, 25.48x smaller" in text
    assert f"file         {table.stat().st_size:,} bytes" in text
    damaged = bytearray(table.read_bytes())
    damaged[-1] ^= 1
    table.write_bytes(damaged)
    assert inspect.main([str(table)]) == 2
    assert "does not match its checksum" in capsys.readouterr().err


def test_a_K_that_wastes_bits(tmp_path, capsys) -> None:
    source = save_toy(tmp_path / "in.pt", make_layer(K=6))
    assert inspect.main([str(source)]) == 0
    note = "encoder.embed_tokens: K=6 takes 3 bits a code, as K=8 does; K=4 takes 2"
    assert note in capsys.readouterr().out


def test_errors(tmp_path, capsys) -> None:
    assert inspect.main([str(save_toy(tmp_path / "toy.pt")), "--dpq-K", "1"]) == 2
    assert "error: --dpq-K 1: must be from 2 to" in capsys.readouterr().err
    assert inspect.main([str(tmp_path / "none.pt")]) == 2
    assert "fairseq-dpq-inspect: error: cannot read" in capsys.readouterr().err
