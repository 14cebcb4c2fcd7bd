"""fairseq-dpq-report: files of every kind side by side, odd tables, refusals."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import compact, export, report
from fairseq_dpq.report import page
from helpers.report_files import dictionary, exported, full
from helpers.toy_checkpoints import PATH, load, make_layer, save_toy

pytest.importorskip("matplotlib")

LOG = '2026 | INFO | valid | {"valid_loss": "2.5", "valid_ppl": "5.7", "valid_num_updates": "10"}\n'


def test_all_kinds_side_by_side(tmp_path: Path, capsys) -> None:
    words = dictionary(tmp_path / "dict.txt", [f"w{i}" for i in range(56)])
    source, small, table = (tmp_path / name for name in ("a.pt", "b.pt", "c.safetensors"))
    save_toy(source, make_layer())
    base = full(tmp_path / "full.pt", torch.randn(60, 12))
    assert compact.main([str(source), str(small)]) == 0
    assert export.main([str(small), str(table), "--dict", str(words)]) == 0
    (tmp_path / "train.log").write_text(LOG)
    capsys.readouterr()
    out = tmp_path / "out"
    argv = [f"SX={source}", str(small), str(table), "--full", str(base), "--dict", str(words)]
    argv += ["--words", "w3", "w50", "--log", f"SX={tmp_path / 'train.log'}", "--out", str(out)]
    assert report.main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "report.html")
    facts = json.loads((out / "report.json").read_text())
    assert [(m["name"], m["kind"]) for m in facts["models"]] == [
        ("full", "full"),
        ("SX", "training"),
        ("c", "exported"),
    ]
    assert facts["models"][1]["sizes"]["compact_file_bytes"] == small.stat().st_size
    assert facts["reference"] == "full" and facts["notes"] == []
    assert facts["curves"] == {"SX": {"valid loss": [[10, 2.5]], "valid ppl": [[10, 5.7]]}}
    chosen = facts["words"][PATH]
    assert [entry["word"] for entry in chosen] == ["w3", "w50"]
    assert chosen[0]["models"]["SX"] == chosen[0]["models"]["c"]
    assert chosen[0]["models"]["full"]["row"] == 7
    stems = {path.stem for path in (out / "figures").iterdir()}
    assert {"sizes", "curves", "distances", "codes-sx-encoder-embed-tokens"} <= stems
    assert not list(out.glob(".figures-*"))
    text = (out / "report.html").read_text(encoding="utf-8")
    for section in ("search", "sizes", "codes", "distances", "neighbours", "words", "training"):
        assert f'<section id="{section}">' in text or f'id="{section}"' in text

    assert report.main(argv) == 2
    assert "report.html exists; use --force" in capsys.readouterr().err
    assert report.main([*argv, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written_by"] == facts["written_by"]


@pytest.mark.parametrize(("n", "D", "K"), [(40, 1, 300), (1, 2, 2), (7, 3, 2)])
def test_odd_shapes(tmp_path: Path, capsys, n: int, D: int, K: int) -> None:
    codes = torch.randint(0, K, (n, D), dtype=torch.int16)
    path = exported(tmp_path / "t.safetensors", codes, torch.randn(D, K, 2), None, 0)
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 0
    (model,) = json.loads((tmp_path / "out" / "report.json").read_text())["models"]
    assert (model["tables"][0]["K"], model["tables"][0]["D"]) == (K, D)
    assert sum(map(sum, model["tables"][0]["use"]["counts"])) == (n - 1) * D


def test_empty_table_and_no_table(tmp_path: Path, capsys) -> None:
    empty = full(tmp_path / "empty.pt", torch.zeros(0, 4))
    assert report.main([str(empty), "--out", str(tmp_path / "one")]) == 0
    facts = json.loads((tmp_path / "one" / "report.json").read_text())
    assert facts["models"][0]["tables"][0]["num_embeddings"] == 0 and facts["words"] == {}
    none = full(tmp_path / "none.pt", torch.zeros(1, 4))
    state = load(none)
    state["model"] = {"x": torch.zeros(2)}
    torch.save(state, none)
    assert report.main([str(none), "--out", str(tmp_path / "two")]) == 0
    assert "No token embedding found" in (tmp_path / "two" / "report.html").read_text()


def test_million_symbols_are_sampled(tmp_path: Path, capsys) -> None:
    n = 1_000_000
    codes = (torch.arange(n * 2).view(n, 2) % 16).to(torch.uint8)
    path = exported(tmp_path / "t.safetensors", codes, torch.randn(2, 16, 2))
    assert report.main([str(path), "--out", str(tmp_path / "out"), "--words", "5"]) == 0
    html = tmp_path / "out" / "report.html"
    assert html.stat().st_size < 15_000_000
    text = html.read_text(encoding="utf-8")
    assert "The search holds the first 100,000 of 1,000,000 symbols" in text
    (model,) = json.loads((tmp_path / "out" / "report.json").read_text())["models"]
    use, shared = model["tables"][0]["use"], model["tables"][0]["shared"]
    assert use["counts"][0] == [125_000, 0] * 8
    assert (shared["distinct"], shared["sharing"]) == (8, n)


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (str(self.path), "w"))


def test_nothing_of_a_strangers_file_runs(tmp_path: Path, capsys) -> None:
    for name, save in (
        ("zip.pt", lambda value, file: torch.save(value, file)),
        ("plain.pt", lambda value, file: file.write_bytes(pickle.dumps(value))),
        ("evil.safetensors", lambda value, file: file.write_bytes(pickle.dumps(value))),
    ):
        save({"model": _Evil(tmp_path / "owned")}, tmp_path / name)
        assert report.main([str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert not (tmp_path / "owned").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--neighbours", "0"], "--neighbours 0: give a number from 1 to 100"),
        (["--words", "nothing"], "--words nothing: no table has them; there is no dictionary"),
        (["--log", "nowhere"], "cannot read --log nowhere"),
        (["--full", "A"], "is a training checkpoint, not a full one"),
        (["--dict", "encoder.embed_tokens=none.txt"], "none.txt: cannot read it: No such file"),
        (["--dict", "none.txt"], "--dict none.txt: cannot read it: No such file"),
        (["--dict", "A"], "not a fairseq dictionary: "),
    ],
)
def test_refusals_leave_nothing(tmp_path: Path, capsys, more: list[str], message: str) -> None:
    path = save_toy(tmp_path / "a.pt", make_layer())
    more = [str(path) if word == "A" else word for word in more]
    assert report.main([str(path), "--out", str(tmp_path / "out"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_failure_midway_leaves_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    def fail(*args: object) -> str:
        raise OSError("disk full")

    path = save_toy(tmp_path / "a.pt", make_layer())
    monkeypatch.setattr(page, "render_page", fail)
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 1
    assert "disk full" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    assert report.main([str(path), "--out", str(tmp_path / "mine")]) == 1
    assert list((tmp_path / "mine").iterdir()) == []  # a folder of the user's stays


def test_names(tmp_path: Path, capsys) -> None:
    path = save_toy(tmp_path / "a=b.pt", make_layer())
    assert report._named([str(path), f"x={path}"])[0] == ["a=b", "x"]
    assert report.main([f"x={path}", f"x={path}", "--out", str(tmp_path / "out")]) == 2
    assert "x is there twice; give names that differ" in capsys.readouterr().err
    assert report.main([str(path), "--out", str(path)]) == 2
    assert "is a file; give a folder" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, capsys, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = save_toy(tmp_path / "a.pt", make_layer())
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'fairseq-dpq[plots]'" in capsys.readouterr().err
