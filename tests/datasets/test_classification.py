"""Text classification sets, from rows and archives to binarised data, and their errors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.datasets import PrepareError
from experiments.datasets.__main__ import prepare
from experiments.datasets.checksums import UNKNOWN
from experiments.datasets.classification import SETS, is_held_out
from experiments.datasets.rows import Columns, Labels, Row, read_rows
from experiments.datasets.sources import required
from fairseq_dpq.cli.classify import split_words
from helpers.data_server import Server, make_tgz, tree, write_checksums
from helpers.documents import make_rows


def run(name: str, *argv: object) -> int:
    return prepare(name, [str(arg) for arg in argv])


def read_file(folder: Path, text: str | bytes, columns: Columns) -> list[tuple[str, str, int]]:
    path = folder / "rows"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(row.label, " ".join(row.texts), row.line) for row in read_rows(path, columns)]


# ---- rows ----


def test_words_are_lower_case_runs_of_letters_and_digits() -> None:
    text = 'Oil &lt;b&gt; "U.S." prices_2 #39;s \\band Éa 中文，x'
    words = "oil lt b gt u s prices_2 39 s band éa 中文 x"
    assert split_words(text) == words.split()
    assert split_words(" ... ") == []


def test_rows_of_csv(tmp_path: Path) -> None:
    text = '\ufeff"1","A ""b"" c","x\\ny, z"\n\n2,title,"two\nlines"\r\n'
    columns = Columns("1", ("2", "3"), 3)
    assert read_file(tmp_path, text, columns) == [
        ("1", 'A "b" c x\\ny, z', 1),
        ("2", "title two\nlines", 4),
    ]
    escaped = Columns("1", ("3",), 3, escaped_newlines=True)
    assert read_file(tmp_path, text, escaped)[0][1] == "x y, z"


def test_rows_of_tsv_keep_quotes_and_find_columns_by_name(tmp_path: Path) -> None:
    text = 'text\tlabel\n"a b\t1\nit\'s "q"\t0\n'
    columns = Columns("label", ("text",), header=True, tab=True)
    assert read_file(tmp_path, text, columns) == [("1", '"a b', 2), ("0", 'it\'s "q"', 3)]


TWO = Columns("1", ("2",))


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("1,a\n2,b,c\n", TWO, "line 2: 3 columns, expected 2"),
        ("1,a,b\n", Columns("1", ("2",), 2), "line 1: 3 columns, expected 2"),
        ("1,a\n", Columns("1", ("3",)), "no column 3, its first row has 2"),
        ("1,a\n", Columns("0", ("2",)), "no column 0"),
        ("1,a\n", Columns("label", ("2",)), "names need --header"),
        ("x,y\n1,a\n", Columns("label", ("2",), header=True), "no single column 'label'; it has x"),
        ('1,"a\n2,b\n', TWO, "line 2: broken quotes (unexpected end of data)"),
        ('1,"a"b\n', TWO, "line 1: broken quotes"),
        (b"1,a\n2,\xff\n", TWO, "line 2: not UTF-8 text"),
        ("", TWO, "is empty"),
        ("\n\n", TWO, "is empty"),
        ("x,y\n", Columns("1", ("2",), header=True), "no rows in it"),
        (" ,a\n", TWO, "line 1: the label is empty"),
    ],
)
def test_bad_rows(tmp_path: Path, text: str | bytes, columns: Columns, message: str) -> None:
    with pytest.raises(PrepareError) as error:
        read_file(tmp_path, text, columns)
    assert message in str(error.value)
    # The name of a column is the fault of a flag, not of the file.
    assert str(tmp_path / "rows") in str(error.value) or "--header" in message


def find(labels: Labels, stored: str, line: int = 1) -> str:
    return labels.find(Row(stored, (), line), Path("f"))


def test_labels_are_in_the_order_of_numbers_or_letters() -> None:
    for given, order in ((("10", "2", "1"), ["1", "2", "10"]), (("b", "a c"), ["a_c", "b"])):
        labels = Labels(open=True)
        assert [find(labels, stored) for stored in given] == [s.replace(" ", "_") for s in given]
        labels.close(Path("f"))
        assert list(labels.names.values()) == order
    with pytest.raises(PrepareError, match="f, line 9: unknown label 'd'; the classes are a c, b"):
        find(labels, "d", 9)


def test_held_out_part_has_its_size_and_depends_on_the_seed() -> None:
    texts = [f"document {i}" for i in range(20_000)]
    first = [is_held_out(text, 0.05, 1) for text in texts]
    assert abs(sum(first) - 1000) < 4 * 31  # four standard deviations
    second = [is_held_out(text, 0.05, 2) for text in texts]
    assert sum(a and b for a, b in zip(first, second)) < 100


# ---- the sets ----


ZHANG = {name: data for name, data in SETS.items() if data.classes}


@pytest.mark.parametrize("name", ZHANG)
def test_sets_are_those_of_the_paper(name: str) -> None:
    data = ZHANG[name]
    classes = data.classes.split()
    assert len(classes) == len(set(classes))
    assert (len(classes), data.documents["train"], data.documents["test"]) == {
        "ag_news": (4, 120_000, 7_600),
        "yahoo_answers": (10, 1_400_000, 60_000),
        "dbpedia": (14, 560_000, 70_000),
        "yelp_polarity": (2, 560_000, 38_000),
        "yelp_full": (5, 650_000, 50_000),
    }[name]
    for wanted in (required(name, f"{split}.csv") for split in ("train", "test")):
        assert all(route.digest != UNKNOWN for route in wanted.routes if "torch" not in str(route))
    assert data.columns.count == 1 + len(data.columns.texts)


def ag_files() -> dict[str, bytes]:
    """A small AG News in the dialect of the release."""
    names = ("1", "2", "3", "4")
    rows = [[k, f"Title {t.split()[0]}", t + "\\band"] for k, t in make_rows(400, 3, names)]
    test = [[k, "T", t] for k, t in make_rows(50, 4, names)]
    quoted = [[",".join(f'"{f}"' for f in row) + "\n" for row in part] for part in (rows, test)]
    return dict(zip(("train.csv", "test.csv"), ("".join(q).encode() for q in quoted)))


@pytest.mark.slow
def test_ag_news_from_an_archive_on_the_network(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ag_files()
    archive = make_tgz({f"ag_news_csv/{name}": data for name, data in files.items()})
    server.files["/fast-ai-nlp/ag_news_csv.tgz"] = archive
    server.break_off["/fast-ai-nlp/ag_news_csv.tgz"] = [1000]  # it is resumed
    sums = write_checksums(tmp_path / "sums", {**files, "ag_news_csv.tgz": archive})
    flags = ["--out", tmp_path / "bin", "--work", tmp_path / "w", "--checksums", sums]
    flags += ["--mirror", server.url, "--workers", 1, "--retries", 1]
    assert run("ag_news", *flags) == 0
    printed = capsys.readouterr().out
    assert "warning: train documents: 400, documented is 120000" in printed
    assert "4 classes: World, Sports, Business, Sci/Tech" in printed
    # 4 x 20 words of the classes, 20 that all share, title, band
    assert "102 types in the training file (the paper's table has 69,322 rows)" in printed
    assert ("/fast-ai-nlp/ag_news_csv.tgz", "bytes=1000-") in server.requests

    out = tmp_path / "bin"
    names = [f"{s}.{end}" for s in ("train", "valid", "test") for end in ("bin", "idx")]
    expected = [f"{part}/{name}" for part in ("input0", "label") for name in [*names, "dict.txt"]]
    assert tree(out) == sorted([*expected, "prepare.json"])
    assert (out / "label" / "dict.txt").read_text().split()[::2] == ZHANG["ag_news"].classes.split()
    report = json.loads((out / "prepare.json").read_text())["result"]["report"]
    assert all(f"| {line}\n" in printed for line in report)
    counts = {line.split(":")[0]: int(line.split()[1]) for line in report[:3]}
    assert counts["train"] + counts["valid"] == 400 and counts["test"] == 50
    assert 5 <= counts["valid"] <= 40
    ids = np.fromfile(out / "label" / "test.bin", dtype=np.uint16).reshape(50, 2)
    stored = [line.split(",")[0].strip('"') for line in files["test.csv"].decode().splitlines()]
    assert ids[:, 0].tolist() == [3 + int(label) for label in stored]  # 4 is the first class
    assert set(ids[:, 1]) == {2}  # end of line
    dictionary = (out / "input0" / "dict.txt").read_text().splitlines()
    counted = [int(line.split()[1]) for line in dictionary]
    assert counted == sorted(counted, reverse=True)
    assert f"title {counts['train']}" in dictionary and f"band {counts['train']}" in dictionary

    server.requests.clear()
    assert run("ag_news", *flags) == 0
    assert "nothing to do" in capsys.readouterr().out and server.requests == []


@pytest.mark.slow
def test_csv_files_give_the_same_bytes_with_any_number_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(6000, 5, ("b c", "a", "z"))  # more than one chunk
    lines = ["text\tkind", *(f"{text}\t{label}" for label, text in rows)]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    # Its columns are found by name: another order, and one more.
    (tmp_path / "test.tsv").write_text("id\tkind\ttext\n1\ta\tnew words z1\n2\tz\t!\n")
    flags = ["--train", tmp_path / "train.tsv", "--test", tmp_path / "test.tsv", "--tab"]
    flags += ["--header", "--label-column", "kind", "--text-columns", "text", "--seed", 7]
    found = []
    for workers in (1, 2):
        out = tmp_path / f"bin{workers}"
        where = ["--out", out, "--work", tmp_path / "w", "--workers", workers]
        assert run("csv_files", *flags, *where) == 0
        found.append(
            {name: hashlib.md5((out / name).read_bytes()).hexdigest() for name in tree(out)}
        )
    assert found[0] == found[1]
    printed = capsys.readouterr().out
    assert "test: 2 documents, 3 words, 2 unknown; 1 documents without words" in printed
    assert "3 classes: a, b_c, z\n" in printed
    ids = np.fromfile(tmp_path / "bin1" / "label" / "test.bin", dtype=np.uint16)
    assert ids.tolist() == [4, 2, 6, 2]
    assert not (tmp_path / "w").exists()
    # other options are another build
    assert run("csv_files", *flags, *where, "--min-count", 1000) == 0
    printed = capsys.readouterr().out
    assert "bin2: done" in printed
    assert "81 types in the training file; 5 dictionary entries in fairseq" in printed  # b


NUMBERED = "".join(f"{{0}},x{i}\n{{1}},y{i}\n" for i in range(60))


@pytest.mark.parametrize(
    ("train", "test", "flags", "message"),
    [
        ("a,x\nb,y\n", "c,x\n", [], "unknown label 'c'; the classes are a, b"),
        ("a,x\na,y\n", "a,x\n", [], "all labels are equal"),
        ("a,x\nb,y\n", "a,x,y\n", [], "3 columns, expected 2"),
        (
            "k,t\na,x\nb,y\n",
            "k,t,u\na,x,y\n",
            ["--header", "--text-columns", "t"],  # the label by its number
            "3 columns, expected 2",
        ),
        (
            "k,t\na,x\nb,y\n",
            "kind,t\na,x\n",
            ["--header", "--label-column", "k", "--text-columns", "t"],
            "no single column 'k'; it has kind, t",
        ),
        ("a,x\nb,y\n", "", [], "test.csv: is empty"),
        ("a,.\nb,.\n" * 40, "a,x\n", ["--held-out", "0.5"], "rows for"),
        (
            "a,x\nb,y\n",
            "a,x\n",
            ["--held-out", "1e-9"],
            "--held-out 1e-09 leaves no rows for valid",
        ),
        ("a,x\nb,y\n", "a,x\n", ["--held-out", "1"], "--held-out 1.0: must be between 0 and 1"),
        ("a,x\nb,y\n", "a,x\n", ["--min-count", "0"], "--min-count 0: must be at least 1"),
        ("a,x\nb,y\n", "a,x\n", ["--valid", "nowhere"], "--valid nowhere: no such file"),
        ("a,x\nb,y\n", "a,x\n", ["--text-columns", ","], "name at least one column"),
        (NUMBERED.format("a b", "a_b"), "a_b,x\n", [], "entry 2, 'a_b', occurs twice"),
        (NUMBERED.format("a", "<pad>"), "a,x\n", [], "entry 1, '<pad>', occurs twice"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    train: str,
    test: str,
    flags: list[str],
    message: str,
) -> None:
    (tmp_path / "train.csv").write_text(train)
    (tmp_path / "test.csv").write_text(test)
    base = ["--train", tmp_path / "train.csv", "--test", tmp_path / "test.csv", "--workers", 1]
    base += ["--out", tmp_path / "bin", "--work", tmp_path / "w"]
    assert run("csv_files", *base, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert error.startswith("prepare.sh csv_files: error: ")
    assert tree(tmp_path) == ["test.csv", "train.csv"]


def test_label_outside_a_known_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ag_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data.replace(b'"4"', b'"5"', 1))
    flags = ["--from", tmp_path, "--out", tmp_path / "b", "--work", tmp_path / "w", "--workers", 1]
    assert run("ag_news", *flags) == 2
    assert "wrong size" in capsys.readouterr().err
    assert run("ag_news", *flags, "--no-checksum") == 2
    assert "unknown label '5'; the classes are 1, 2, 3, 4" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_csv_files_have_no_download_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("csv_files", "--help")
    text = capsys.readouterr().out
    assert "--mirror" not in text and "--label-column" in text
    with pytest.raises(SystemExit):
        run("ag_news", "--help")
    assert "--mirror" in capsys.readouterr().out
