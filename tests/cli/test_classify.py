"""fairseq-dpq-classify: labels and scores of a text, equal for the compact form, and its errors."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from fairseq_dpq.cli import classify, compact
from helpers import fsq
from helpers.documents import FLAGS, make_documents
from helpers.tool_runs import TF, train

pytestmark = pytest.mark.slow

TEXT = 'Yes1 "YES2", any3!\n\nno4 no5 no6; never-seen\nyes7\r\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The data, a trained checkpoint and its compact form."""
    root = tmp_path_factory.mktemp("classify")
    data = make_documents(root)
    dpq = "--dpq-K 8 --dpq-D 8 --dpq-warmup-updates 10 --max-update 60"
    trained = train(data, root / "run", f"{FLAGS} --optimizer lazy_adam {dpq}")
    small = root / "compact.pt"
    assert compact.main([str(trained), str(small)]) == 0
    return data, trained, small


def labels(capsysbinary: pytest.CaptureFixture[bytes], *argv: object) -> list[str]:
    capsysbinary.readouterr()
    assert classify.main([*map(str, argv), "--cpu", "--debug"]) == 0
    return capsysbinary.readouterr().out.decode().splitlines()


def test_labels_and_scores(run, tmp_path: Path, capsysbinary, monkeypatch) -> None:
    _, trained, small = run
    (tmp_path / "text").write_text(TEXT)
    lines = labels(capsysbinary, small, tmp_path / "text")
    assert len(lines) == 4
    found = [line.split("\t") for line in lines]
    assert [found[i][0] for i in (0, 2, 3)] == ["yes", "no", "yes"]
    assert all(0.5 <= float(score) <= 1 and len(score) == 6 for _, score in found)
    # The same in training form, in batches of one, and from standard input.
    assert labels(capsysbinary, trained, tmp_path / "text") == lines
    assert labels(capsysbinary, small, tmp_path / "text", "--batch-size", 1) == lines
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert labels(capsysbinary, small, "-") == lines
    both = labels(capsysbinary, small, tmp_path / "text", "--scores")[0].split("\t")
    assert both[::2] == ["yes", "no"] and both[:2] == found[0]
    assert float(both[1]) + float(both[3]) == pytest.approx(1, abs=2e-4)
    facts = json.loads(labels(capsysbinary, small, tmp_path / "text", "--json", "--scores")[2])
    assert facts["label"] == "no" and facts["scores"]["no"] == facts["score"]
    # Words as they are: "YES2", with its quotes is not in the dictionary.
    (tmp_path / "words").write_text("no1 no2\nYES2, yes3,\n")
    split = labels(capsysbinary, small, tmp_path / "words", "--tokenized")
    assert split[0].startswith("no\t") and split[1] == lines[1]


def test_labels_agree_with_fairseq_validate(run, tmp_path: Path, capsysbinary) -> None:
    data, _, small = run
    argv = [data, "--user-dir", fsq.USER_DIR, "--path", small, "--cpu", "--valid-subset", "test"]
    argv += ["--task", "text_classification", "--batch-size", "7", "--log-format", "simple"]
    accuracy = fsq.logged(fsq.main("validate", [str(a) for a in argv]), r"\| accuracy")[-1]
    rows = [line.split(",", 1) for line in (data.parent / "test.csv").read_text().splitlines()]
    (tmp_path / "test.txt").write_text("".join(text + "\n" for _, text in rows))
    out = tmp_path / "out.tsv"
    assert classify.main([str(small), str(tmp_path / "test.txt"), "--output", str(out)]) == 0
    found = [line.split("\t")[0] for line in out.read_text().splitlines()]
    right = sum(a == b.strip('"') for a, (b, _) in zip(found, rows))
    assert len(found) == 24 and round(100 * right / 24, 2) == accuracy


def test_data_may_have_moved(run, tmp_path: Path, capsysbinary) -> None:
    data, _, small = run
    (tmp_path / "text").write_text(TEXT)
    lines = labels(capsysbinary, small, tmp_path / "text")
    moved = tmp_path / "moved"
    data.rename(moved)
    try:
        assert classify.main([str(small), str(tmp_path / "text")]) == 2
        error = capsysbinary.readouterr().err.decode()
        assert "name it by --data" in error and error.count("\n") == 1
        assert labels(capsysbinary, small, tmp_path / "text", "--data", moved) == lines
    finally:
        moved.rename(data)


def test_dictionaries_of_other_data(run, tmp_path: Path, capsys) -> None:
    """Not a wrong label without a word: rows would be those of other words."""
    data, trained, small = run
    (tmp_path / "text").write_text(TEXT)
    words = (data / "input0" / "dict.txt").read_text().splitlines(keepends=True)
    classes = (data / "label" / "dict.txt").read_text()
    for name, entries, labels_, message in (
        ("fewer", words[:-3], classes, "rows, but the dictionary of this data gives"),
        ("more", [*words, "new 1\n"], classes, "rows, but the dictionary of this data gives"),
        ("classes", words, classes + "perhaps 1\n", "does not fit the dictionaries in"),
    ):
        other = tmp_path / name
        shutil.copytree(data, other)
        (other / "input0" / "dict.txt").write_text("".join(entries))
        (other / "label" / "dict.txt").write_text(labels_)
        for checkpoint in (trained, small):
            capsys.readouterr()
            argv = [checkpoint, tmp_path / "text", "--data", other, "--cpu"]
            assert classify.main([str(a) for a in argv]) == 2
            assert message in capsys.readouterr().err.splitlines()[-1]


def test_errors_are_one_line(run, tmp_path: Path, corpus: Path, capsys) -> None:
    _, _, small = run
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "bad").write_bytes(b"yes1\n\xff\xfe\n")
    other = train(corpus, tmp_path / "other", TF)
    for argv, message in (
        ([small, tmp_path / "nowhere"], "no file"),
        ([tmp_path / "nowhere.pt", tmp_path / "text"], "nowhere.pt"),
        ([tmp_path / "text", tmp_path / "text"], "text"),
        ([other, tmp_path / "text"], "is a model of --task translation, not of"),
        ([small, tmp_path / "bad", "--output", tmp_path / "out"], "bad, line 2: not UTF-8 text"),
        ([small, tmp_path / "text", "--output", tmp_path / "text"], "is the input itself"),
        ([small, tmp_path / "text", "--batch-size", 0], "--batch-size 0: must be at least 1"),
    ):
        capsys.readouterr()
        assert classify.main([*map(str, argv), "--cpu"]) == 2
        error = capsys.readouterr().err.splitlines()
        assert error[-1].startswith("fairseq-dpq-classify: error: ") and message in error[-1]
    assert not (tmp_path / "out").exists()
