"""Files of every kind as the report takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import compact, export
from fairseq_dpq.cli.report import _named
from fairseq_dpq.cli.text import short_names
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.report.models import join_compact, load_model
from helpers.report_files import dictionary, exported, full
from helpers.toy_checkpoints import PATH, make_layer, make_state, save_toy

WORDS = [f"w{i}" for i in range(56)]


def test_training_compact_and_exported_are_one_table(tmp_path: Path) -> None:
    words = dictionary(tmp_path / "dict.txt", WORDS)
    source, small, table = (tmp_path / name for name in ("a.pt", "b.pt", "c.safetensors"))
    save_toy(source, make_layer())
    assert compact.main([str(source), str(small)]) == 0
    assert export.main([str(small), str(table), "--dict", str(words)]) == 0
    models = [load_model(path, path.stem, {"": words}) for path in (source, small, table)]
    assert [model.kind for model in models] == ["training", "compact", "exported"]
    first = models[0].tables[0]
    assert first.path == PATH and first.n == 60
    for model in models:
        (own,) = model.tables
        assert torch.equal(own.codes, first.codes)
        assert torch.equal(own.rows(torch.arange(60)), first.rows(torch.arange(60)))
        assert own.symbols is not None and own.symbols[:5] == [
            "<s>",
            "<pad>",
            "</s>",
            "<unk>",
            "w0",
        ]
        # packed: 60 rows of 4 codes of 3 bits, 8 x 12 values of 4 bytes, 32 bytes of checksum
        assert own.facts["compact_bytes"] == 60 * 2 + 4 * 8 * 12
        assert own.facts["full_bytes"] == 4 * 60 * 12
    assert models[0].sizes["optimizer_bytes"] == 2 * 4 * 60 * 12
    assert models[0].sizes["compact_model_bytes"] == models[1].sizes["model_bytes"]
    assert models[0].updates == 7


def test_training_checkpoint_and_its_compact_file_are_one_model(tmp_path: Path) -> None:
    source, small, other = (tmp_path / name for name in ("a.pt", "b.pt", "other/a.pt"))
    other.parent.mkdir()
    save_toy(source, make_layer())
    save_toy(other, make_layer(seed=1))
    assert compact.main([str(source), str(small)]) == 0
    models = [load_model(path, str(path), {}) for path in (other, source, small)]
    joined = join_compact(models)
    assert [model.path for model in joined] == [other, source]
    assert joined[1].sizes["compact_file_bytes"] == small.stat().st_size
    assert "compact_file" not in joined[0].sizes  # the same name, other codes


def test_full_table(tmp_path: Path) -> None:
    table = torch.randn(6, 4).half()
    model = load_model(full(tmp_path / "full.pt", table), "full", {})
    (own,) = model.tables
    assert model.kind == "full" and own.parts is None and own.symbols is None
    assert (own.facts["stored_bytes"], own.facts["full_bytes"]) == (48, 96)
    assert torch.equal(own.rows(torch.tensor([5])), table[5:].float())
    assert "add --dict FILE" in model.notes[0]


def test_dictionary_beside_the_checkpoints_folder_is_found(tmp_path: Path) -> None:
    """`fairseq-train bin --save-dir run` leaves a relative path in the checkpoint."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()
    dictionary(tmp_path / "bin" / "dict.txt", WORDS)
    state = make_state(make_layer())
    state["cfg"]["task"] = {"data": "bin"}
    torch.save(state, tmp_path / "run" / "a.pt")
    model = load_model(tmp_path / "run" / "a.pt", "a", {})
    assert model.tables[0].symbol(4) == "w0" and model.notes == []


def test_dictionary_of_a_table_must_fit_and_one_of_all_may_not(tmp_path: Path) -> None:
    path = save_toy(tmp_path / "a.pt", make_layer())
    short = dictionary(tmp_path / "short.txt", WORDS[:9])
    with pytest.raises(CheckpointError, match="has 13 symbols"):
        load_model(path, "a", {PATH: short})
    model = load_model(path, "a", {"": short})
    assert model.tables[0].symbol(4) == "#4" and "has 13 symbols" in model.notes[0]


def test_damaged_and_foreign_files_are_one_line(tmp_path: Path) -> None:
    codes, values = torch.zeros(3, 2, dtype=torch.uint8), torch.randn(2, 4, 3)
    whole = exported(tmp_path / "a.safetensors", codes, values).read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-5])
    for name in ("a.safetensors", "none.safetensors", "none.pt"):
        with pytest.raises(CheckpointError, match=r"damaged|truncated|cannot read"):
            load_model(tmp_path / name, "a", {})


def test_names_are_as_short_as_they_can_be() -> None:
    paths = [Path("runs/sx/compact.pt"), Path("runs/vq/compact.pt")]
    assert short_names(paths) == ["sx/compact.pt", "vq/compact.pt"]
    assert short_names([Path("x/a.pt"), Path("x/b.safetensors")]) == ["a.pt", "b.safetensors"]


def test_a_checkpoint_beside_its_export() -> None:
    """Names have no ending, and differ all the same."""
    given = ["a/model.pt", "b/model.safetensors", "c=c/model.pt"]
    assert _named(given) == (["a/model", "b/model", "c"], [Path(p.split("=")[-1]) for p in given])
