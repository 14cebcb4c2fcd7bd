"""The numbers of a whole report: words, neighbours beside a full table, change, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.report.build import build_report
from fairseq_dpq.report.models import Model, load_model
from fairseq_dpq.report.words import CHOSEN, chosen_words, word_facts
from helpers.report_files import dictionary, exported, full
from helpers.toy_checkpoints import PATH, make_layer, make_state, save_toy

# Five words after fairseq's four symbols; two groups, four codes, one number each.
CODES = torch.tensor(
    [[0, 0], [0, 0], [3, 3], [3, 0], [0, 1], [0, 2], [1, 1], [0, 1], [2, 3]], dtype=torch.uint8
)
VALUES = torch.tensor([[[1.0], [2], [-1], [-2]], [[0.0], [1], [3], [-1]]])
WORDS = ["house", "home", "tree", "houses", "cat"]
SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", *WORDS]


@pytest.fixture
def small(tmp_path: Path) -> Model:
    return load_model(exported(tmp_path / "s.safetensors", CODES, VALUES, SYMBOLS, 1), "small", {})


@pytest.fixture
def large(tmp_path: Path) -> Model:
    """Rows (x, y); nearest to house (1, 1): cat, then home, then tree."""
    rows = [[0, 0], [0, 0], [-9, 0], [-9, 1], [1, 1], [1, 3], [4, 0.5], [-1, -1], [2, 2.1]]
    path = full(tmp_path / "full.pt", torch.tensor(rows, dtype=torch.float32))
    return load_model(path, "full", {"": dictionary(tmp_path / "dict.txt", WORDS)})


def test_word_beside_the_full_table(small: Model, large: Model) -> None:
    """Rows of the codes: house (1, 1), houses the same, tree (2, 1), home (1, 3), cat (-1, -1)."""
    report = build_report([large, small], words=["house"], neighbours=3)
    assert report["reference"] == "full" and report["tables"] == [PATH]
    (word,) = report["words"][PATH]
    ours, theirs = word["models"]["small"], word["models"]["full"]
    assert ours["row"] == 4 and ours["codes"] == [0, 1]
    assert [entry["symbol"] for entry in ours["neighbours"]] == ["houses", "tree", "home"]
    assert [entry["cosine"] for entry in ours["neighbours"]] == [1.0, 0.9487, 0.8944]
    assert [entry["symbol"] for entry in theirs["neighbours"]] == ["cat", "home", "tree"]
    assert ours["overlap"] == pytest.approx(2 / 3) and "overlap" not in theirs


def test_use_and_shared_codes(small: Model) -> None:
    (table,) = build_report([small])["models"][0]["tables"]
    assert table["use"]["counts"] == [[4, 1, 1, 2], [2, 3, 1, 2]]
    assert table["use"]["used"] == [4, 4] and (table["K"], table["D"]) == (4, 2)
    assert (table["shared"]["sharing"], table["shared"]["symbols"]) == (2, 8)
    assert table["shared"]["largest_sets"][0]["symbols"] == ["house", "houses"]


def test_change_between_two_checkpoints_of_a_run(tmp_path: Path) -> None:
    """6 of 60 symbols get another code in group 2; a third checkpoint changes nothing."""
    layer = make_layer(method="vq", schedule="warmup")
    codes = layer.codes().long()
    paths = [save_toy(tmp_path / "1.pt", layer)]
    with torch.no_grad():
        for row in range(10, 16):
            other = (codes[row, 2] + 1) % 8
            layer.query.view(60, 4, 3)[row, 2] = layer.values[2, other]
    paths += [save_toy(tmp_path / "2.pt", layer), save_toy(tmp_path / "3.pt", layer)]
    (tmp_path / "other").mkdir()
    paths.append(save_toy(tmp_path / "other" / "4.pt", layer))
    report = build_report([load_model(path, path.stem, {}) for path in paths])
    changes = [(c["from"], c["to"], c["codes"], c["symbols"]) for c in report["changes"]]
    assert changes == [("1", "2", pytest.approx(6 / 240), 0.1), ("2", "3", 0, 0)]
    assert report["changes"][0]["updates"] == 7


def test_full_model_shows_the_tables_of_the_others(tmp_path: Path, small: Model) -> None:
    state = make_state(make_layer())
    del state["cfg"]["model"].dpq_tables
    tables = {PATH: torch.randn(9, 2), "decoder.embed_tokens": torch.randn(7, 2)}
    state["model"] = {f"{path}.weight": table for path, table in tables.items()}
    torch.save(state, tmp_path / "both.pt")
    both = load_model(tmp_path / "both.pt", "both", {})
    assert build_report([both])["tables"] == [PATH, "decoder.embed_tokens"]
    report = build_report([both, small])
    assert report["tables"] == [PATH]
    assert report["models"][0]["sizes"]["embedding_bytes"] == 4 * 9 * 2


def test_words_that_are_missing(small: Model) -> None:
    report = build_report([small], words=["tree", "<b>none</b>"])
    assert [entry["word"] for entry in report["words"][PATH]] == ["tree"]
    assert "no table has the symbol <b>none</b>" in report["notes"]
    with pytest.raises(CheckpointError, match="--words nothing: no table has them"):
        build_report([small], words=["nothing"])


def test_words_that_are_chosen_are_words(tmp_path: Path) -> None:
    n = 400
    symbols = ["<s>", "<pad>", *(f"{i}" if i % 2 else "ab" * (i % 7 + 2) + "cd" for i in range(n))]
    codes = torch.zeros(n + 2, 1, dtype=torch.uint8)
    path = exported(tmp_path / "t.safetensors", codes, torch.ones(1, 2, 2), symbols, 1)
    chosen = chosen_words(load_model(path, "t", {}).tables, [])
    assert 2 <= len(chosen) <= CHOSEN and all(word.isalpha() for word in chosen)


def test_without_a_dictionary_rows_have_numbers(tmp_path: Path) -> None:
    path = exported(tmp_path / "t.safetensors", CODES, VALUES)
    model = load_model(path, "t", {})
    (word,) = word_facts([model], PATH, ["#4"], None, 2)
    assert [entry["symbol"] for entry in word["models"]["t"]["neighbours"]] == ["#7", "#6"]
    assert chosen_words(model.tables, ["8", "12", "x"]) == ["8"]
