"""Archives: wanted members are extracted completely; anything outside the folder is refused.

Every failure must leave the target folder as it was.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from experiments.datasets import PrepareError
from experiments.datasets.archives import extract
from helpers.data_server import make_tgz, make_zip, tree

MEMBERS = {"./d/a.txt": b"alpha\n" * 50_000, "d/b.txt": b"beta\n"}


def put(tmp_path: Path, name: str, data: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["x.tgz", "x.tar.gz", "x.zip"])
def test_members_are_extracted(tmp_path: Path, kind: str) -> None:
    make = make_zip if kind.endswith("zip") else make_tgz
    archive = put(tmp_path, kind, make(MEMBERS))
    out = tmp_path / "out"
    extract(archive, {"d/a.txt": out / "1", "d/*b.txt": out / "2"})
    assert (out / "1").read_bytes() == MEMBERS["./d/a.txt"]
    assert (out / "2").read_bytes() == b"beta\n"
    assert tree(out) == ["1", "2"]


def test_gzip_of_one_file(tmp_path: Path) -> None:
    archive = put(tmp_path, "a.txt.gz", gzip.compress(b"text\n"))
    extract(archive, {"a.txt": tmp_path / "out" / "a.txt"})
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"text\n"


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "d/../../evil", "C:/evil", "..\\evil"])
@pytest.mark.parametrize("kind", ["x.tgz", "x.zip"])
def test_member_outside_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    make = make_zip if kind.endswith("zip") else make_tgz
    archive = put(tmp_path, kind, make({**MEMBERS, name: b"evil"}))
    with pytest.raises(PrepareError, match="points outside the target folder"):
        extract(archive, {"d/a.txt": tmp_path / "out" / "a"})
    assert tree(tmp_path) == [kind]


@pytest.mark.parametrize("target", ["../../etc", "/etc/passwd"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_link_outside_is_refused(tmp_path: Path, target: str, kind: bytes) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("d/a.txt")
        info.type, info.linkname = kind, target
        tar.addfile(info)
    archive = put(tmp_path, "x.tgz", buffer.getvalue())
    with pytest.raises(PrepareError, match=r"refused: .*(outside|absolute)"):
        extract(archive, {"d/a.txt": tmp_path / "out" / "a"})
    assert tree(tmp_path) == ["x.tgz"]


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["x.tgz", "x.zip", "x.gz"])
def test_truncated_archive(tmp_path: Path, kind: str, keep: float) -> None:
    data = {
        "x.tgz": make_tgz(MEMBERS), "x.zip": make_zip(MEMBERS), "x.gz": gzip.compress(b"a" * 9999)
    }[kind]  # fmt: skip
    archive = put(tmp_path, kind, data[: int(len(data) * keep)])
    with pytest.raises(PrepareError, match="cut short or damaged"):
        extract(archive, {"d/a.txt": tmp_path / "out" / "a"})
    assert tree(tmp_path) == [kind]


def test_other_archive_and_not_an_archive(tmp_path: Path) -> None:
    foreign = put(tmp_path, "x.tgz", make_tgz({"other.txt": b"1"}))
    with pytest.raises(PrepareError, match=r"has no member d/a\.txt"):
        extract(foreign, {"d/a.txt": tmp_path / "out" / "a"})
    page = put(tmp_path, "y.tgz", b"<html>please log in</html>")
    with pytest.raises(PrepareError, match="is not a tar, zip or gzip file"):
        extract(page, {"d/a.txt": tmp_path / "out" / "a"})
    assert tree(tmp_path) == ["x.tgz", "y.tgz"]
