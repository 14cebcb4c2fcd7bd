"""The WMT19 script with a local server and the documented layouts, and its errors.

One run is broken at its last step, resumed, and compared with a run from unpacked files.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils

from experiments.datasets import parallel
from experiments.datasets.__main__ import prepare
from experiments.datasets.parallel import clean_chunk, read_tasks
from experiments.datasets.translation import write_sample
from helpers import wmt_files as wmt
from helpers.data_server import Server, make_tgz, make_zip, messages, tree, write_checksums

pytestmark = pytest.mark.slow

SMALL = ["--vocab-size", "300", "--max-ratio", "3", "--shard-pairs", "150", "--spm-sample", "200"]


def serve(server: Server, tmp_path: Path, changed: dict[str, bytes] | None = None) -> list[str]:
    """Put the archives on the server; the flags to fetch them with checksums of these bytes."""
    server.files = {**wmt.ARCHIVES, **(changed or {})}
    sums = {path.rsplit("/", 1)[-1]: data for path, data in server.files.items()}
    write_checksums(tmp_path / "sums", sums)
    return [
        "--out", str(tmp_path / "bin"), "--work", str(tmp_path / "w"), "--mirror", server.url,
        "--checksums", str(tmp_path / "sums"), "--retries", "0", *SMALL,
    ]  # fmt: skip


def read_back(folder: Path, split: str, language: str) -> list[str]:
    words = Dictionary.load(str(folder / f"dict.{language}.txt"))
    data = data_utils.load_indexed_dataset(str(folder / f"{split}.en-de.{language}"), words)
    lines = [words.string(data[i]) for i in range(len(data))]
    return [data_utils.post_process(line, "sentencepiece") for line in lines]


def test_six_corpora_resumed_and_again_from_files(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = serve(server, tmp_path)
    server.browsers_only = True
    for path in wmt.ARCHIVES:
        server.break_off[path] = [400]
    out = tmp_path / "bin"

    broken = tmp_path / "broken" / "fairseq_cli"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise SystemExit('killed')")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(broken.parent))
        assert prepare("wmt19", [*flags, "--workers", "2"]) == 2
    captured = capsys.readouterr()
    assert "fairseq-preprocess failed (1): killed" in captured.err
    assert captured.out.count("reading and cleaning") == 6
    assert not out.exists() and not (tmp_path / ".bin.partial").exists()
    for path in wmt.ARCHIVES:  # each was interrupted once and resumed
        assert [asked for name, asked in server.requests if name == path] == ["", "bytes=400-"]

    server.requests.clear()
    assert prepare("wmt19", [*flags, "--workers", "2"]) == 0
    printed = capsys.readouterr().out
    assert server.requests == [] and "reading and cleaning" not in printed
    assert "SentencePiece: 300" not in printed and "encoding" not in printed
    report = [line[2:] for line in printed.splitlines()]
    assert report[-len(wmt.COUNTS) - 1 : -1] == wmt.COUNTS
    assert tree(tmp_path / "w" / "stages") == []  # intermediate text is removed

    words = Dictionary.load(str(out / "dict.de.txt"))
    uses = [0] * len(words)
    for shard, language in itertools.product(("train", "train1"), ("en", "de")):
        data = data_utils.load_indexed_dataset(str(out / f"{shard}.en-de.{language}"), words)
        for sentence in data:
            for symbol in sentence.tolist():
                uses[symbol] += 1
    assert words.count[words.nspecial :] == uses[words.nspecial :]

    # The text came through: order of corpora, both sides, both shards.
    german = read_back(out, "train", "de") + read_back(out, "train1", "de")
    english = read_back(out, "train", "en") + read_back(out, "train1", "en")
    assert len(read_back(out, "train", "de")) == 150
    assert list(zip(german, english))[:20] == wmt.EUROPARL[:20]
    assert ("Zeile eins", "line one") in zip(german, english)
    assert ('Er sagte "ja', 'He said "yes') in zip(german, english)
    assert ("Fisch & <Chips>", "fish & <chips>") in zip(german, english)
    assert list(zip(german, english))[-20:] == wmt.RAPID[:20]
    # References as sacreBLEU reads them, entities kept; model text without entities.
    assert (out / "raw" / "valid.de").read_text().splitlines()[-1] == "Müller &amp; Söhne"
    assert read_back(out, "valid", "en")[-1] == "Miller & Sons"
    assert read_back(out, "test", "en") == [english for _, english in wmt.TEST]

    # Other file forms, another folder, one process: the same bytes.
    files = tmp_path / "in"
    files.mkdir()
    for name, data in wmt.UNPACKED.items():
        (files / name).write_bytes(data)
    again = tmp_path / "again"
    assert prepare("wmt19", [
        "--from", str(files), "--out", str(again), "--work", str(tmp_path / "w2"),
        "--no-checksum", "--workers", "1", *SMALL,
    ]) == 0  # fmt: skip
    assert tree(again) == tree(out)
    for name in tree(out):
        if name != "prepare.json":
            assert (again / name).read_bytes() == (out / name).read_bytes(), name
    capsys.readouterr()
    assert prepare("wmt19", [*flags, "--workers", "1"]) == 0
    assert "nothing to do" in capsys.readouterr().out


CRAWL = "/wmt13/training-parallel-commoncrawl.tgz"
RAPID = "/tilde-model/rapid2019.de-en.zip"
TMX = "/web-language-models/paracrawl/release3/en-de.bicleaner07.tmx.gz"
EUROPARL = "/europarl/v9/training/europarl-v9.de-en.tsv.gz"
TEST = "/wmt19/translation-task/test.tgz"


def _failures() -> list[tuple[str, str, bytes, str]]:
    crawl = wmt.parallel("commoncrawl.de-en", wmt.CRAWL)
    short = {**crawl, "commoncrawl.de-en.en": b"one line\n"}
    cut = gzip.compress(gzip.decompress(wmt.ARCHIVES[TMX])[:-200])
    other = wmt.sgm(2019, wmt.TEST)
    other["newstest2019-ende-ref.de.sgm"] = other["newstest2019-ende-ref.de.sgm"].replace(
        b"doc.5", b"doc.6"
    )
    return [
        ("commoncrawl", CRAWL, make_tgz({**crawl, "../evil": b"1"}), "'../evil' points outside"),
        ("commoncrawl", CRAWL, make_tgz({"other.de": b"1"}), "no member commoncrawl.de-en.de"),
        ("commoncrawl", CRAWL, make_tgz(short), "en has 1 lines, "),
        ("rapid", RAPID, make_zip({**wmt.parallel("rapid2019.de-en", wmt.RAPID), "/evil": b"1"}),
         "'/evil' points outside"),
        ("rapid", RAPID, b"<html>", "is not a tar, zip or gzip"),
        ("paracrawl", TMX, cut, "not a whole TMX file"),
        ("paracrawl", TMX, wmt.ARCHIVES[TMX][:-9], "cut short or damaged"),
        ("europarl", EUROPARL, wmt.ARCHIVES[EUROPARL][:300], "cut short or damaged"),
        ("europarl", EUROPARL, gzip.compress(b"\t\n\n"), "no sentence pair in it"),
        ("europarl", TEST, make_tgz({f"sgm/{k}": v for k, v in other.items()}),
         "segment 1 of doc.5 where"),
    ]  # fmt: skip


# Named by message: archives carry the time, and test processes must agree on names.
@pytest.mark.parametrize(
    ("corpus", "path", "data", "message"), _failures(), ids=[f[-1] for f in _failures()]
)
def test_bad_files(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    corpus: str,
    path: str,
    data: bytes,
    message: str,
) -> None:
    flags = serve(server, tmp_path, {path: data})
    assert prepare("wmt19", [*flags, "--corpora", corpus, "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert not (tmp_path / "bin").exists() and not (tmp_path / "evil").exists()
    assert tree(tmp_path / "w" / "stages") == []
    assert [name for name in tree(tmp_path / "w") if name.endswith((".part", ".tmp"))] == []


def test_wrong_checksum_and_server_that_never_finishes(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*serve(server, tmp_path), "--corpora", "wikititles,europarl"]
    good = server.files[EUROPARL]
    server.files[EUROPARL] = good[:-1] + b"\x01"
    assert prepare("wmt19", flags) == 2
    error = capsys.readouterr().err
    assert "europarl-v9.de-en.tsv.gz: " in error and "wrong checksum: sha256 " in error
    assert not (tmp_path / "w" / "downloads" / "europarl-v9.de-en.tsv.gz").exists()

    server.files[EUROPARL] = good
    server.break_off[EUROPARL] = [100] + [0] * 20
    assert prepare("wmt19", flags) == 2
    assert "interrupted after 100 of " in capsys.readouterr().err
    part = tmp_path / "w" / "downloads" / "europarl-v9.de-en.tsv.gz.part"
    assert part.read_bytes() == good[:100]
    assert not (tmp_path / "bin").exists()


def test_other_forms_are_named_where_they_are_used(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = serve(server, tmp_path)
    for path, others in wmt.STAND_INS.items():
        del server.files[path]
        server.files.update(others)
    corpora = ["--corpora", "europarl,paracrawl,rapid", "--workers", "1", "--keep"]
    assert prepare("wmt19", [*flags, *corpora]) == 0
    captured = capsys.readouterr()
    told = [line for line in messages(captured.err) if " instead" in line]
    doubt = " instead (it has no known checksum)"
    assert [line.rpartition("; trying ")[2] for line in told] == [
        f"{name}{doubt}"
        for name in ("wmt20-dev.tgz", "en-de.bicleaner07.txt.gz", "rapid2019.de-en.tmx.zip")
    ]
    assert f"{server.url}{TMX}: HTTP 404 Not Found" in told[1]
    for line in (
        "| paracrawl (en-de.bicleaner07.txt.gz): 36 read, 36 pairs kept\n",
        "| rapid (rapid2019.de-en.tmx.zip): 22 read, 22 pairs kept\n",
        "| valid (newstest2018 from dev.tgz): 13 pairs\n",
        "| test (newstest2019 from wmt20-dev.tgz): 12 pairs\n",
    ):
        assert line in captured.out
    result = json.loads((tmp_path / "bin" / "prepare.json").read_text())["result"]
    text = server.files[TMX.replace(".tmx.", ".txt.")]
    assert result["inputs"]["en-de.bicleaner07.txt.gz"] == hashlib.sha256(text).hexdigest()
    assert sorted(result["inputs"]) == [
        "dev.tgz", "en-de.bicleaner07.txt.gz", "europarl-v9.de-en.tsv.gz",
        "rapid2019.de-en.tmx.zip", "wmt20-dev.tgz",
    ]  # fmt: skip
    # A failed address is tried once, not for each file in its archive.
    assert [path for path, _ in server.requests].count(TEST) == 1
    # --keep keeps the unpacked files of every corpus.
    kept = {name.split("/")[1] for name in tree(tmp_path / "w") if name.startswith("extracted/")}
    assert kept == {"dev.tgz", "rapid2019.de-en.tmx.zip", "wmt20-dev.tgz"}
    assert (tmp_path / "w" / "stages" / "clean-rapid" / "text.de").exists()


@pytest.mark.parametrize("path", sorted(wmt.STAND_INS))
@pytest.mark.parametrize("case", ["bytes", "room"])
def test_no_other_form_after_wrong_bytes_or_on_a_full_disk(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, case: str
) -> None:
    flags = serve(server, tmp_path)
    server.files.update(wmt.STAND_INS[path])
    if case == "bytes":
        server.files[path] = server.files[path][:-1] + b"\x01"
    else:
        server.length[path] = 1 << 60
    corpus = {TMX: "paracrawl", RAPID: "rapid", TEST: "europarl"}[path]
    assert prepare("wmt19", [*flags, "--corpora", corpus, "--workers", "1"]) == 2
    error = messages(capsys.readouterr().err)[-1]
    assert {"bytes": "wrong checksum: sha256 ", "room": "GB needed, "}[case] in error
    assert " is not used instead, because it has no known checksum" in error
    asked = {name for name, _ in server.requests}
    assert path in asked and not asked & wmt.STAND_INS[path].keys()


def test_a_bad_file_without_a_checksum_is_not_kept(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*serve(server, tmp_path), "--corpora", "paracrawl", "--paracrawl", "txt"]
    text = TMX.replace(".tmx.", ".txt.")
    server.files[text] = gzip.compress(wmt.PARACRAWL_TXT)[:-9]
    del server.files[TMX]
    assert prepare("wmt19", [*flags, "--workers", "1"]) == 2
    error = messages(capsys.readouterr().err)[-1]
    assert "en-de.bicleaner07.txt.gz: cut short or damaged" in error and "HTTP 404" in error
    assert not (tmp_path / "w" / "downloads" / "en-de.bicleaner07.txt.gz").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--corpora", "europarl,gutenberg"], "choose from europarl,paracrawl,commoncrawl,"),
        (["--max-ratio", "0.5"], "--max-ratio 0.5: must be at least 1"),
        (["--corpora", "rapid"], "rapid2019.de-en.en, newstest2018-ende-src.en.sgm, "),
        (["--corpora", "rapid"], "; --corpora leaves out what you do not have"),
    ],
)
def test_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    base = ["--from", str(tmp_path), "--out", str(tmp_path / "b"), "--work", str(tmp_path / "w")]
    assert prepare("wmt19", [*base, *flags]) == 2
    assert message in capsys.readouterr().err
    assert tree(tmp_path) == []


@pytest.mark.parametrize("block", [7, 100, 1 << 20])
def test_blocks_may_be_split_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(parallel, "_BLOCK", block)
    europarl = tmp_path / "a.tsv"
    europarl.write_bytes(wmt.UNPACKED["europarl-v9.de-en.tsv"])
    chunks = [clean_chunk(task) for task in read_tasks([europarl])]
    assert sum(counts["kept"] for *_, counts in chunks) == 62
    assert sum(counts["read"] for *_, counts in chunks) == 68
    sides = [b"".join(chunk[side] for chunk in chunks) for side in (1, 0)]
    rows = list(zip(*(side.decode().split("\n")[:-1] for side in sides)))
    special = [('Er sagte "ja', 'He said "yes'), ("Zeile eins", "line one")]
    assert rows == [*wmt.EUROPARL[:20], *special, *wmt.EUROPARL[20:]]
    tmx = tmp_path / "a.tmx"
    tmx.write_bytes(wmt.UNPACKED["en-de.bicleaner07.tmx"])
    chunks = [clean_chunk(task) for task in read_tasks([tmx])]
    english = b"".join(chunk[0] for chunk in chunks).decode().splitlines()
    assert sorted(english) == sorted(pair[1] for pair in wmt.PARACRAWL)
    # The txt form of ParaCrawl has English first.
    text = tmp_path / "a.txt"
    text.write_bytes(wmt.PARACRAWL_TXT)
    german = b"".join(clean_chunk(task)[1] for task in read_tasks([text]))
    assert german.decode().splitlines() == [pair[0] for pair in wmt.PARACRAWL]


def test_sample_is_exact_and_seeded(tmp_path: Path) -> None:
    for language in ("en", "de"):
        (tmp_path / f"text.{language}").write_text("".join(f"{i}\n" for i in range(1000)))
    found = []
    for seed in (1, 1, 2):
        assert write_sample([tmp_path], 1000, 250, seed, tmp_path / "out") == 250
        lines = (tmp_path / "out").read_text().splitlines()
        assert lines[::2] == lines[1::2]
        found.append([int(line) for line in lines[::2]])
    assert found[0] == found[1] != found[2]
    assert 400 < sum(found[0]) / 250 < 600  # from the whole text
    assert write_sample([tmp_path], 1000, 5000, 1, tmp_path / "out") == 1000


def test_stamp_is_the_same_on_every_machine(tmp_path: Path) -> None:
    """The stamp has names and digests only, and nothing specific to this machine."""
    from experiments.datasets.folders import build_folder

    build_folder(tmp_path / "x", {"a": (1, 2)}, lambda folder: {"n": 1})
    stamp = json.loads((tmp_path / "x" / "prepare.json").read_text())
    assert stamp == {"key": {"a": [1, 2]}, "result": {"n": 1}, "files": {}}
