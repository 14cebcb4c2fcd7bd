"""scripts/prepare.sh bert: text to pieces to binary data, its dictionary, and its errors."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from experiments.datasets import pieces
from experiments.datasets.__main__ import prepare
from experiments.datasets.pieces import SPECIALS
from helpers.data_server import tree

pytestmark = pytest.mark.slow

VOCABULARY = [*SPECIALS[:1], "[unused0]", *SPECIALS[1:], "the", "cat", "##s", "sat", "."]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (tmp_path / "a.txt").write_text("The cats sat.\n\n = <unk> cat =\n")
    with gzip.open(tmp_path / "b.txt.gz", "wb") as stream:
        stream.write(b"the  cat sat\n\x07\n")
    (tmp_path / "v.txt").write_text("The cat.\n")
    (tmp_path / "w.txt").write_text("the .\n")
    return tmp_path


def flags(text: Path, *more: object) -> list[str]:
    base = ["--vocab", text / "vocab.txt", "--train", text / "a.txt", text / "b.txt.gz"]
    base += ["--valid", text / "v.txt", text / "w.txt"]
    base += ["--out", text / "bin", "--work", text / "work", "--workers", 1]
    return [str(word) for word in [*base, *more]]


def ids(folder: Path, split: str) -> list[int]:
    return np.fromfile(folder / f"{split}.bin", dtype=np.uint16).tolist()


def test_text_becomes_ids(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare("bert", flags(text)) == 0
    printed = capsys.readouterr().out
    assert "| train: 3 lines, 12 pieces, 25.00% unknown" in printed
    assert "| valid: 2 lines, 5 pieces, 0.00% unknown" in printed
    # 6 pieces, <s> <pad> </s> <unk>, and <mask> of the task
    assert "| 11 rows of the embedding" in printed
    out = text / "bin"
    files = ["dict.txt", "prepare.json", "vocab.txt"]
    files += [f"{name}.{end}" for name in ("train", "train1", "valid") for end in ("bin", "idx")]
    assert tree(out) == sorted(files)
    assert (out / "dict.txt").read_text().split()[::2] == [
        *("[unused0]", "the", "cat", "##s", "sat", ".")
    ]
    # the cat ##s sat . | = <unk> cat =; blank lines and lines without pieces are left out
    assert ids(out, "train") == [5, 6, 7, 8, 9, 2, 3, 3, 6, 3, 2]
    assert ids(out, "train1") == [5, 6, 8, 2]
    assert ids(out, "valid") == [5, 6, 9, 2, 5, 9, 2]
    assert prepare("bert", flags(text)) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_several_workers_and_documents(text: Path) -> None:
    assert prepare("bert", flags(text, "--workers", 2, "--documents")) == 0
    assert ids(text / "bin", "train") == [5, 6, 7, 8, 9, 2, 2, 3, 3, 6, 3, 2]


def test_interrupted_run_keeps_the_finished_files(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text / "w.txt").write_bytes(b"the\ncat \xff\n")
    assert prepare("bert", flags(text)) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "w.txt, line 2: not UTF-8 text" in errors
    assert not (text / "bin").exists()
    (text / "w.txt").write_text("the .\n")
    assert prepare("bert", flags(text)) == 0
    printed = capsys.readouterr().out
    assert "w.txt: pieces" in printed and "a.txt: pieces" not in printed
    assert ids(text / "bin", "train") == [5, 6, 7, 8, 9, 2, 3, 3, 6, 3, 2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train", "none.txt"], "none.txt: no such file"),
        (["--vocab", "none.txt"], "--vocab none.txt: no such file"),
        (["--spm-size", "100"], "--spm-size 100 and --vocab"),
    ],
)
def test_errors_are_one_line(
    text: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("bert", flags(text, *more)) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (text / "bin").exists()


def test_empty_text_is_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text / "v.txt").write_text("\n \n")
    assert prepare("bert", flags(text)) == 2
    assert "v.txt: no text in it" in capsys.readouterr().err


def test_sentencepiece(text: Path) -> None:
    lines = [f"the cat number {i} sat on mat {i * 7}" for i in range(200)]
    (text / "a.txt").write_text("\n".join(lines) + "\n")
    words = [
        w for w in flags(text, "--spm-size", "60") if w not in ("--vocab", str(text / "vocab.txt"))
    ]
    assert prepare("bert", words) == 0
    out = text / "bin"
    assert len((out / "dict.txt").read_text().splitlines()) == 56
    encoder = pieces.load(out / "spm.model")
    line = "the cat sat"
    expected = [encoder.words.index(piece) + 4 for piece in encoder.encode(line)] + [2]
    assert ids(out, "train1") == expected
    placed = encoder.locate("the  cats\u3000sat")
    assert "".join("the  cats\u3000sat"[p.start : p.end] for p in placed) == "thecatssat"
