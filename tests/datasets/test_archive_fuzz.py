"""Archives with damaged headers: a one-line error, exit code 2, no partial output.

Mutations are seeded: a case that fails is named by its seed and can be run again.
"""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from experiments.datasets import PrepareError
from experiments.datasets.__main__ import prepare
from experiments.datasets.archives import extract
from helpers.data_server import make_zip, tree

TEXT = b"alpha\n" * 400
MEMBERS = {"d/a.txt": TEXT, "d/b.txt": b"beta\n", "d/\u00e9" + "x" * 40: b"gamma\n"}
SPARSE = [
    {"GNU.sparse.map": "0,10,20,5", "GNU.sparse.size": "100"},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "100"},
    {"GNU.sparse.numblocks": "1", "GNU.sparse.offset": "0", "GNU.sparse.numbytes": "3",
     "GNU.sparse.size": "100"},
]  # fmt: skip
TIMES_AND_SIZES = [{"size": "7"}, {"mtime": "1.5"}, {"hdrcharset": "BINARY"}]


def make_tar(form: int = tarfile.PAX_FORMAT, pax: dict[str, str] | None = None) -> bytes:
    """MEMBERS; the first has these pax headers."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in MEMBERS.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.pax_headers = dict(pax or {}) if name == "d/a.txt" else {}
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def make_packed_zip(method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as bundle:
        for name, data in MEMBERS.items():
            bundle.writestr(name, data)
    return buffer.getvalue()


TARS = [
    make_tar(form) for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
] + [make_tar(pax=pax) for pax in [*SPARSE, *TIMES_AND_SIZES]]
ZIPS = [
    make_packed_zip(method)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
]
VALUES = (b"\xff" * 8, b"\0" * 4, b"-1", b"99999999", b"\x80" + b"\0" * 7)


def mutate(draw: random.Random, data: bytes) -> bytes:
    """Flip bits; overwrite, cut and repeat pieces; more often near the headers at both ends."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(out))
        where = draw.random()
        if where < 0.4:
            at = min(at % 1600, len(out) - 1)
        elif where < 0.6:
            at = len(out) - 1 - at % min(200, len(out))
        kind = draw.randrange(5)
        if kind == 0:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            value = draw.choice(VALUES)
            out[at : at + len(value)] = value
        elif kind == 2:
            del out[at : at + draw.choice((1, 3, 512))]
        elif kind == 3:
            out[at:at] = draw.randbytes(draw.choice((1, 4, 512)))
        else:
            other, size = draw.randrange(len(out)), draw.choice((2, 8, 100, 512))
            out[at : at + size] = out[other : other + size]
        out = out or bytearray(b"x")
    return bytes(out)


def repair_sums(data: bytes) -> bytes:
    """Correct the checksums of tar headers, so that a reader gets to their fields."""
    out = bytearray(data)
    for at in range(0, len(out) - 511, 512):
        header = out[at : at + 512]
        if b"ustar" in header[250:270]:
            header[148:156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(header)
    return bytes(out)


def hostile(seed: int) -> tuple[str, bytes]:
    draw = random.Random(seed)
    kind = draw.choice(("x.tar", "x.tgz", "x.zip", "x.gz"))
    if kind == "x.zip":
        return kind, mutate(draw, draw.choice(ZIPS))
    if kind == "x.gz":
        return kind, mutate(draw, gzip.compress(TEXT))
    data = mutate(draw, draw.choice(TARS))
    if draw.random() < 0.8:
        data = repair_sums(data)
    if kind == "x.tgz":
        data = gzip.compress(data, 1)
        if draw.random() < 0.3:
            data = mutate(draw, data)
    return kind, data


def test_mutated_archives_are_extracted_completely_or_refused(tmp_path: Path) -> None:
    refused = whole = 0
    for seed in range(1500):
        kind, data = hostile(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / kind).write_bytes(data)
        try:
            extract(folder / kind, {"d/a.txt": folder / "out" / "a"})
        except PrepareError as error:
            assert str(error).isprintable(), seed
            assert tree(folder) == [kind], seed
            refused += 1
        except Exception as error:
            pytest.fail(f"seed {seed}, {kind}: {error!r}")
        else:
            assert tree(folder) == sorted([kind, "out/a"]), seed
            assert (folder / "out" / "a").stat().st_size < 100_000, seed
            whole += 1
    # Both outcomes occur: some archives are refused, some are extracted.
    assert refused > 800 and whole > 150


def not_utf8_name() -> bytes:
    """A zip whose flag says that names are UTF-8, with one that is not."""
    return make_packed_zip(zipfile.ZIP_STORED).replace("\u00e9".encode(), b"\xff\xfe")


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("x.zip", not_utf8_name(), "cut short or damaged ('utf-8' codec can't decode byte 0xff"),
        ("x.tar", make_tar(pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
         "cut short or damaged (invalid literal for int() with base 10: b'alpha')"),
        ("x.tar", make_tar(pax={"GNU.sparse.map": "0,ten", "GNU.sparse.size": "9"}),
         "cut short or damaged (invalid literal for int()"),
        ("x.tar", make_tar(pax={"GNU.sparse.size": "nine", "GNU.sparse.numblocks": "1"}),
         "cut short or damaged (invalid literal for int()"),
        ("x.tar", make_tar(pax={"GNU.sparse.map": "0,10", "GNU.sparse.size": str(10**15)}),
         "member 'd/a.txt' is a sparse file"),
    ],
)  # fmt: skip
def test_garbage_in_headers(tmp_path: Path, kind: str, data: bytes, message: str) -> None:
    (tmp_path / kind).write_bytes(data)
    with pytest.raises(PrepareError) as caught:
        extract(tmp_path / kind, {"d/a.txt": tmp_path / "out" / "a"})
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"archive {tmp_path / kind}: ")
    assert tree(tmp_path) == [kind]


def test_control_characters_of_names_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(make_zip({"../\x1b[31m\u202e": b"1"}))
    with pytest.raises(PrepareError) as caught:
        extract(tmp_path / "x.zip", {"d/a.txt": tmp_path / "a"})
    assert r"'../\x1b[31m\u202e'" in str(caught.value)
    assert str(PrepareError("a\nb \x1b[31m")) == r"a b \x1b[31m"


def test_full_disk_is_not_the_fault_of_the_archive(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(make_tar())
    (tmp_path / "a.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        extract(tmp_path / "x.tar", {"d/a.txt": tmp_path / "a"})
    assert not isinstance(caught.value, PrepareError)


@pytest.mark.parametrize(
    ("data_set", "name", "data"),
    [
        ("ptb", "simple-examples.tgz",
         gzip.compress(make_tar(pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}))),
        ("wikitext2", "wikitext-2-v1.zip", not_utf8_name()),
    ],
)  # fmt: skip
def test_prepare_prints_a_one_line_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    data_set: str,
    name: str,
    data: bytes,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / name).write_bytes(data)
    assert prepare(data_set, ["--from", "files", "--no-checksum"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"prepare.sh {data_set}: error: archive files/{name}: cut short or damaged (" in lines[0]
    assert not (tmp_path / "data-bin").exists() or tree(tmp_path / "data-bin") == []
