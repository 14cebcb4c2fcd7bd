"""GLUE and XNLI files with their quirks, and what becomes of bad ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.datasets.__main__ import prepare
from experiments.datasets.glue import SETS
from experiments.datasets.pieces import SPECIALS
from experiments.datasets.rows import read_rows
from helpers.data_server import make_zip, tree

VOCABULARY = [*SPECIALS, "a", "b", "c", '"', ".", "\u4e2d"]


def rows(path: Path, name: str, split: str) -> list[tuple[tuple[str, ...], str]]:
    data = SETS[name]
    labels = data.classes()
    found = read_rows(path, data.parts[split == "valid"][2])
    return [(row.texts, labels.find(row, path)) for row in found]


def mnli_line(label: str, where: int) -> str:
    cells = [str(i) for i in range(where + 1)]
    cells[8], cells[9], cells[where] = "one", "two", label
    return "\t".join(cells) + "\n"


def test_columns_of_every_set(tmp_path: Path) -> None:
    path = tmp_path / "f.tsv"
    path.write_text("gj04\t1\t\tA b.\ncj99\t0\t*\tB a.")  # no header, no last line feed
    assert rows(path, "glue_cola", "train") == [(("A b.",), "1"), (("B a.",), "0")]
    path.write_text("sentence\tlabel\na b \t1\n")
    assert rows(path, "glue_sst2", "valid") == [(("a b ",), "1")]
    # A byte order mark, an unbalanced quote, CRLF, and a line separator inside a text
    text = '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t5\t6\t"a b\tc\u2028d\r\n'
    path.write_bytes(text.encode("utf-8"))
    assert rows(path, "glue_mrpc", "train") == [(('"a b', "c\u2028d"), "1")]
    path.write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n")
    assert rows(path, "glue_rte", "train") == [(("a", "b"), "not_entailment")]
    path.write_text("header\n" + mnli_line("neutral", 11))
    assert rows(path, "glue_mnli", "train") == [(("one", "two"), "neutral")]
    path.write_text("header\n" + mnli_line("entailment", 15))
    assert rows(path, "glue_mnli", "valid") == [(("one", "two"), "entailment")]
    path.write_text("premise\thypo\tlabel\na\tb\tcontradictory\n")
    assert rows(path, "glue_xnli", "train") == [(("a", "b"), "contradiction")]
    path.write_text("language\tgold_label\t2\t3\t4\t5\tsentence1\tsentence2\n"
                    "en\tneutral\t2\t3\t4\t5\tx\ty\nzh\tneutral\t2\t3\t4\t5\ta\tb\n")  # fmt: skip
    assert rows(path, "glue_xnli", "valid") == [(("a", "b"), "neutral")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"header\n1\t2\n", "line 2: 2 columns, expected at least 5"),
        (b"header\n7\t2\t3\ta\tb\n", "line 2: unknown label '7'; the classes are 0, 1"),
        (b"header\n1\t2\t3\ta\t\xff\n", "line 2: not UTF-8 text"),
        (b"header\n", "no rows in it"),
        (b"header\n1\t2\t3\ta\tb\n", "train rows: 1, documented is 3668"),
    ],
)
def test_bad_files_give_one_line_and_no_folder(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_bytes(content)
    flags = ["--from", tmp_path, "--vocab", tmp_path / "vocab.txt", "--workers", 1]
    flags += ["--out", tmp_path / "out" / "bin", "--work", tmp_path / "work"]
    assert prepare("glue_mrpc", [str(flag) for flag in flags]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_missing_vocabulary_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare("glue_rte", ["--from", str(tmp_path)]) == 2
    assert "vocab.txt: no such file; run: scripts/prepare.sh bert" in capsys.readouterr().err


@pytest.mark.slow
def test_pairs_from_the_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    header = "index\tsentence1\tsentence2\tlabel\n"
    train = header + "0\tA b\tc\tnot_entailment\n1\t\u4e2d\tB\tentailment\n"
    dev = header + "0\tc x\ta\tentailment\n"
    archive = make_zip({"RTE/train.tsv": train.encode(), "RTE/dev.tsv": dev.encode()})
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "RTE.zip").write_bytes(archive)
    flags = ["--from", tmp_path / "from", "--vocab", tmp_path / "vocab.txt", "--no-checksum"]
    flags += ["--out", tmp_path / "bin", "--work", tmp_path / "work", "--workers", 1]
    assert prepare("glue_rte", [str(flag) for flag in flags]) == 0
    printed = capsys.readouterr().out
    assert "warning: train rows: 2, documented is 2490" in printed
    assert "| train: 2 rows of 2.5 pieces on average (1 entailment, 1 not_entailment)" in printed
    out = tmp_path / "bin"
    assert {name.split("/")[0] for name in tree(out)} == {
        *("input0", "input1", "label", "prepare.json", "vocab.txt")
    }
    ids = {
        part: np.fromfile(out / part / "train.bin", dtype=np.uint16).tolist()
        for part in ("input0", "input1", "label")
    }
    assert ids == {"input0": [4, 5, 2, 9, 2], "input1": [6, 2, 5, 2], "label": [5, 2, 4, 2]}
    valid = np.fromfile(out / "input0" / "valid.bin", dtype=np.uint16).tolist()
    assert valid == [6, 3, 2]  # c, unknown, end
