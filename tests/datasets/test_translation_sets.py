"""Multi30k and IWSLT15 scripts on small generated texts in the original formats.

Binarised data are read back with fairseq and compared with the text that went in.
"""

from __future__ import annotations

import gzip
import random
from collections import Counter
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils

from experiments.datasets import PrepareError
from experiments.datasets.__main__ import prepare
from experiments.datasets.binarize import write_dictionary
from experiments.datasets.detokenize import detokenize
from helpers.data_server import Server, make_tgz, tree, write_checksums

pytestmark = pytest.mark.slow

NOUNS = ["Hund", "Katze", "Baum", "Haus", "Kind", "Mann", "Frau", "Straße", "Wiese", "Tür"]


def captions(count: int, seed: int) -> tuple[list[str], list[str]]:
    rng = random.Random(seed)
    pairs = [rng.sample(NOUNS, 3) for _ in range(count)]
    english = [f"A {a} with a {b}, near the “{c}”." for a, b, c in pairs]
    german = [f"Ein {a} und  ein {b} „beim“ {c}." for a, b, c in pairs]
    return english, german


def as_bytes(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def multi30k_files() -> dict[str, bytes]:
    files = {}
    for number, (split, count) in enumerate(
        [("train", 300), ("val", 20), ("test_2016_flickr", 30), ("test_2017_flickr", 25)]
    ):
        english, german = captions(count, number)
        if split == "train":
            english[7], german[9] = " ", ""
        files[f"{split}.en"], files[f"{split}.de"] = as_bytes(english), as_bytes(german)
    return files


def read_back(folder: Path, split: str, pair: str, language: str) -> list[str]:
    words = Dictionary.load(str(folder / f"dict.{language}.txt"))
    data = data_utils.load_indexed_dataset(str(folder / f"{split}.{pair}.{language}"), words)
    return [words.string(data[i]) for i in range(len(data))]


def piece_counts(folder: Path) -> Counter[str]:
    """The counts of the dictionary, which has pieces that no line has too."""
    words = Dictionary.load(str(folder / "dict.en.txt"))
    first = words.nspecial
    return +Counter(dict(zip(words.symbols[first:], words.count[first:])))


def test_multi30k_from_the_network(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = multi30k_files()
    for name, data in files.items():
        server.files[f"/multi30k/dataset/master/data/task1/raw/{name}.gz"] = gzip.compress(data)
    sums = write_checksums(tmp_path / "sums", files)
    out = tmp_path / "bin"
    flags = ["--out", out, "--work", tmp_path / "w", "--checksums", sums, "--mirror", server.url]
    flags += ["--vocab-size", 150, "--test-sets", "test_2016_flickr,test_2017_flickr"]
    assert prepare("multi30k", [str(flag) for flag in [*flags, "--workers", 2]]) == 0
    printed = capsys.readouterr().out
    assert "train (train.de.gz, train.en.gz): 300 read, 298 pairs kept; dropped: 2 " in printed
    assert "test1 (test_2017_flickr from test_2017_flickr.de.gz, test_2017_flickr" in printed
    assert "150 dictionary entries in fairseq, joint" in printed
    assert (out / "dict.en.txt").read_bytes() == (out / "dict.de.txt").read_bytes()
    text = [line for lang in ("en", "de") for line in read_back(out, "train", "en-de", lang)]
    assert piece_counts(out) == Counter(" ".join(text).split())
    for split, origin in (("valid", "val"), ("test", "test_2016_flickr")):
        assert (out / "raw" / f"{split}.de").read_bytes() == files[f"{origin}.de"]
        pieces = read_back(out, split, "en-de", "de")
        text = [data_utils.post_process(line, "sentencepiece") for line in pieces]
        raw = files[f"{origin}.de"].decode().splitlines()
        assert text == [
            line.replace("  ", " ") for line in raw
        ]  # unchanged except for a double space
    assert not (tmp_path / "w" / "extracted").exists()

    # Another folder, from local files, on one core: the same bytes.
    plain = tmp_path / "in"
    plain.mkdir()
    for name, data in files.items():
        (plain / name).write_bytes(data)
    flags[1] = again = tmp_path / "again"
    assert prepare("multi30k", [str(f) for f in [*flags, "--from", plain, "--workers", 1]]) == 0
    assert tree(again) == tree(out)
    for name in tree(out):
        if name != "prepare.json":
            assert (again / name).read_bytes() == (out / name).read_bytes(), name


def test_multi30k_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = multi30k_files()
    source = tmp_path / "in"
    source.mkdir()
    for name, data in files.items():
        (source / name).write_bytes(data)
    base = ["--from", str(source), "--out", str(tmp_path / "b"), "--work", str(tmp_path / "w")]

    def error(*flags: str) -> str:
        assert prepare("multi30k", [*base, *flags]) == 2
        text = capsys.readouterr().err
        # A cleaned corpus is kept for the next run.
        left = [name for name in tree(tmp_path) if not name.startswith("w/stages/clean-train/")]
        assert text.count("\n") == 1 and left == [f"in/{n}" for n in sorted(files)]
        return text

    assert "train.de: wrong size" in error()
    assert "SentencePiece says: Vocabulary size too high (8000)" in error(
        "--no-checksum", "--vocab-size", "8000"
    )
    assert "no test_2020.en, test_2020.de (nor test_2020.en.gz, " in error(
        "--test-sets", "test_2020"
    )
    files["val.de"] = files["val.de"].split(b"\n", 1)[1]
    (source / "val.de").write_bytes(files["val.de"])
    assert "val.de has 19 lines, " in error("--no-checksum", "--vocab-size", "150")


def iwslt_files() -> dict[str, bytes]:
    words = {"en": ["I", "&apos;m", "here", ",", "."], "vi": ["Tôi", "ở", "đây", ",", "."]}
    rng = random.Random(3)
    files = {}
    for language, known in words.items():
        files[f"vocab.{language}"] = as_bytes(["<unk>", "<s>", "</s>", *known])
    for split, count in (("train", 40), ("tst2012", 9), ("tst2013", 10)):
        for language, known in words.items():
            lines = [" ".join(rng.choices(known, k=7)) for _ in range(count)]
            lines[2] = lines[2].replace(known[0], "zebra")
            files[f"{split}.{language}"] = as_bytes(lines)
    files["tst2013.en"] = as_bytes(["I &apos;m a . I"] * 10)  # 1 of 5 unknown
    files["tst2013.vi"] = as_bytes(["Tôi ở đây , b c d e"] * 10)  # 4 of 8 unknown
    files["train.vi"] = files["train.vi"].replace(b"\n", b"\n \n", 1)
    files["train.en"] = files["train.en"].replace(b"\n", b"\nhere .\n", 1)
    return files


def test_iwslt15_archive_when_the_first_host_is_down(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = iwslt_files()
    archive = make_tgz({f"iwslt15.en-vi/{name}": data for name, data in files.items()})
    server.files["/paddlenlp/datasets/iwslt15.en-vi.tar.gz"] = archive
    for name in files:
        server.status[f"/projects/nmt/data/iwslt15.en-vi/{name}"] = 403
    sums = write_checksums(tmp_path / "sums", {**files, "iwslt15.en-vi.tar.gz": archive})
    out = tmp_path / "bin"
    flags = ["--out", out, "--work", tmp_path / "w", "--checksums", sums, "--mirror", server.url]
    assert prepare("iwslt15", [str(flag) for flag in [*flags, "--workers", 1]]) == 0
    printed = capsys.readouterr().out
    assert "train (train): 40 pairs; 1 dropped: empty side; " in printed
    assert "en 50 tokens, 20.00 % unknown; vi 80 tokens, 50.00 % unknown" in printed
    assert "dictionary entries in fairseq: en 9, vi 9" in printed
    assert Dictionary.load(str(out / "dict.vi.txt")).symbols[4:] == ["Tôi", "ở", "đây", ",", "."]
    assert read_back(out, "test", "en-vi", "vi") == ["Tôi ở đây , <unk> <unk> <unk> <unk>"] * 10
    assert (out / "raw" / "test.en").read_bytes() == files["tst2013.en"]
    assert (out / "raw" / "test.detok.en").read_text() == "I'm a. I\n" * 10
    asked = [path for path, _ in server.requests]
    assert asked.count("/paddlenlp/datasets/iwslt15.en-vi.tar.gz") == 1


def test_iwslt15_names_the_flag_for_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in iwslt_files().items():
        (tmp_path / name).write_bytes(data)
    flags = ["--from", str(tmp_path), "--out", str(tmp_path / "b"), "--work", str(tmp_path / "w")]
    assert prepare("iwslt15", flags) == 2
    assert "pass --no-checksum train.en if it is meant to differ" in capsys.readouterr().err
    (tmp_path / "vocab.vi").write_bytes(as_bytes(["Tôi", "ở"]))
    assert prepare("iwslt15", [*flags, "--no-checksum"]) == 2
    assert "vocab.vi: begins with ['Tôi', 'ở']" in capsys.readouterr().err
    (tmp_path / "vocab.vi").unlink()
    assert prepare("iwslt15", [*flags, "--no-checksum"]) == 2
    assert "no vocab.vi (nor iwslt15.en-vi.tar.gz)\n" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_dictionary_refuses_what_fairseq_cannot_read(tmp_path: Path) -> None:
    for bad, why in ((["a", "b", "a"], "3, 'a', occurs twice"), (["a\u2028b"], "not a single"),
                     (["<pad>"], "occurs twice"), ([""], "not a single")):  # fmt: skip
        with pytest.raises(PrepareError, match=why):
            write_dictionary(tmp_path / "dict.txt", bad)
    assert not (tmp_path / "dict.txt").exists()


@pytest.mark.parametrize(
    ("tokenised", "running"),
    [
        ("I &apos;m sure it wasn &apos;t", "I'm sure it wasn't"),
        ("called &quot; Nothing To Envy . &quot;", 'called "Nothing To Envy."'),
        ("a song ( &#91; sic &#93; ) , no ?", "a song ([sic]), no?"),
        ("Q &amp; A , &amp;apos; too", "Q & A, &apos; too"),
        ("two &quot; a &quot; and &quot; b &quot; .", 'two "a" and "b".'),
        ("", ""),
    ],
)
def test_detokenize(tokenised: str, running: str) -> None:
    assert detokenize(tokenised) == running
