"""Routes to a file: which may replace which, and what happens to bad downloads.

Against a real server; its log of requests shows what was asked for.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from experiments.datasets import PrepareError
from experiments.datasets.checksums import UNKNOWN, Checks, Digest, hash_files
from experiments.datasets.download import Downloader, Remote
from experiments.datasets.sources import RequiredFile, Sources, required
from helpers.data_server import Server, make_tgz, messages, tree

TEXT = b"eins\nzwei\n" * 100
PAGE = b"<html>please log in</html>"


def digest(data: bytes) -> Digest:
    return Digest(len(data), "sha256", hashlib.sha256(data).hexdigest())


def network(work: Path, **kwargs: object) -> Sources:
    checks = Checks(**kwargs)  # type: ignore[arg-type]
    return Sources(None, work, Downloader(work / "downloads", checks, retries=0, wait=0.01))


def packed(server: Server, name: str, known: Digest = UNKNOWN, *more: str) -> Remote:
    urls = tuple(server.url + path for path in (f"/{name}", *more))
    return Remote(name, urls, known, member="a")


def asked(server: Server) -> list[str]:
    return [path for path, _ in server.requests]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (PAGE, "is not a tar, zip or gzip file: it begins with b'<htm'"),
        (gzip.compress(TEXT)[:-20], "cut short or damaged"),
        (gzip.compress(TEXT + b"drei\n"), "wrong size: 1005 bytes, expected 1000"),
    ],
    ids=["page", "half", "changed"],
)
def test_bad_archive_is_replaced_by_the_next_address_and_route(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes, why: str
) -> None:
    """Only the member has a known checksum, so the archive itself looks correct."""
    archive = make_tgz({"a": TEXT})
    server.files = {"/a.gz": bad, "/second/a.gz": bad, "/b.tgz": archive}
    routes = packed(server, "a.gz", UNKNOWN, "/second/a.gz"), packed(server, "b.tgz")
    wanted = [RequiredFile("a", routes, digest(TEXT))]
    sources = network(tmp_path)
    assert sources.obtain(wanted)["a"].read_bytes() == TEXT
    assert asked(server) == ["/a.gz", "/second/a.gz", "/b.tgz"]
    lines = messages(capsys.readouterr().err)
    assert len(lines) == 3
    for line, path in zip(lines, ("/a.gz", "/second/a.gz")):
        assert line.startswith(server.url + path) and why in line and line.endswith("deleted")
    assert lines[2].startswith("cannot download a.gz: ")
    assert lines[2].endswith("; trying b.tgz instead")
    assert tree(tmp_path / "downloads") == ["b.tgz"]
    used = hashlib.sha256(archive).hexdigest()
    assert hash_files(sources.used.values()) == {"b.tgz": used}


def test_bad_archive_is_not_kept_for_the_next_run(server: Server, tmp_path: Path) -> None:
    server.files["/a.gz"] = PAGE
    wanted = [RequiredFile("a", (packed(server, "a.gz"),), digest(TEXT))]
    with pytest.raises(PrepareError, match=r"/a\.gz: archive .* is not a tar, zip or gzip file"):
        network(tmp_path).obtain(wanted)
    assert tree(tmp_path) == []
    server.files["/a.gz"] = gzip.compress(TEXT)
    assert network(tmp_path).obtain(wanted)["a"].read_bytes() == TEXT

    # One that an earlier run left behind.
    (tmp_path / "downloads" / "a.gz").write_bytes(PAGE)
    server.requests.clear()
    assert network(tmp_path).obtain(wanted)["a"].read_bytes() == TEXT
    assert asked(server) == ["/a.gz"]


def test_documented_archive_and_local_files_are_kept(server: Server, tmp_path: Path) -> None:
    foreign = make_tgz({"other": b"1"})
    server.files["/a.tgz"] = foreign
    wanted = [RequiredFile("a", (packed(server, "a.tgz", digest(foreign), "/second/a.tgz"),))]
    for _ in range(2):
        with pytest.raises(PrepareError, match="has no member a"):
            network(tmp_path / "w").obtain(wanted)
    assert asked(server) == ["/a.tgz"]  # the same bytes again would not help

    mine = tmp_path / "in"
    mine.mkdir()
    (mine / "a.tgz").write_bytes(PAGE)
    sources = Sources(mine, tmp_path / "w2", Downloader(tmp_path / "w2", Checks(frozenset("*"))))
    with pytest.raises(PrepareError, match="is not a tar, zip or gzip file"):
        sources.obtain(wanted)
    assert (mine / "a.tgz").read_bytes() == PAGE


def test_no_unverified_file_replaces_wrong_bytes(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = gzip.compress(TEXT), gzip.compress(b"another text\n")
    server.files = {"/b.gz": other, "/c.gz": good}
    routes = packed(server, "a.gz", digest(good)), packed(server, "b.gz")
    wanted = [RequiredFile("a", routes)]
    # Not available: the other one is used, with a message.
    assert network(tmp_path / "1").obtain(wanted)["a"].read_bytes() == b"another text\n"
    url = f"{server.url}/a.gz"
    assert messages(capsys.readouterr().err) == [
        f"{url}: HTTP 404 Not Found",
        f"cannot download a.gz: {url}: HTTP 404 Not Found; trying b.gz instead (it has no "
        "known checksum)",
    ]
    # Wrong bytes: the other one is not used, even after further failures.
    refused = "b.gz is not used instead, because it has no known checksum"
    server.requests.clear()
    server.files["/a.gz"] = PAGE
    with pytest.raises(PrepareError, match=rf"wrong size: 26 bytes, .*; {refused} \(run again"):
        network(tmp_path / "2").obtain(wanted)
    assert asked(server) == ["/a.gz"]
    known = packed(server, "missing.gz", digest(good))
    with pytest.raises(PrepareError, match=rf"wrong size: .* HTTP 404 .*; {refused}"):
        network(tmp_path / "2").obtain([RequiredFile("a", (routes[0], known, routes[1]))])
    assert "/b.gz" not in asked(server)
    # One with a known checksum is used.
    known = packed(server, "c.gz", digest(good))
    found = network(tmp_path / "3").obtain([RequiredFile("a", (*routes, known))])
    assert found["a"].read_bytes() == TEXT and "/b.gz" not in asked(server)
    # So is one whose member has a known checksum; a wrong member is refused.
    with pytest.raises(PrepareError, match="wrong size: 13 bytes, expected 1000"):
        network(tmp_path / "4").obtain([RequiredFile("a", routes, digest(TEXT))])
    # With --no-checksum every file is accepted.
    found = network(tmp_path / "5", skip=frozenset("*")).obtain(wanted)
    assert found["a"].read_bytes() == b"another text\n"


def test_no_unverified_file_is_used_on_a_full_disk(server: Server, tmp_path: Path) -> None:
    good = gzip.compress(TEXT)
    server.files = {"/a.gz": good, "/b.gz": good, "/c.gz": good}
    server.length["/a.gz"] = 1 << 60
    known = digest(good)._replace(size=None)
    unchecked, checked = packed(server, "b.gz"), packed(server, "c.gz", known)
    for routes in ([unchecked], [unchecked, checked]):
        wanted = [RequiredFile("a", (packed(server, "a.gz", known), *routes))]
        if len(routes) == 1:
            with pytest.raises(PrepareError, match=r"GB free; .*; b\.gz is not used instead"):
                network(tmp_path).obtain(wanted)
        else:
            assert network(tmp_path).obtain(wanted)["a"].read_bytes() == TEXT
    assert "/b.gz" not in asked(server)


def test_archives_in_a_folder_are_found_by_name(tmp_path: Path) -> None:
    """test.tgz is WMT19's and never WMT18's; dev.tgz is WMT19's and never WMT20's."""
    sources = Sources(tmp_path, tmp_path / "w", Downloader(tmp_path / "w", Checks()))
    wanted = [required("wmt19", f"newstest{year}-ende-src.en.sgm") for year in (2018, 2019)]

    def found() -> list[tuple[str, str] | None]:
        held = [sources.locate(item) for item in wanted]
        return [h and (h[0].name, h[1].urls[0].split("/")[3]) for h in held]  # type: ignore[union-attr]

    (tmp_path / "test.tgz").touch()
    assert found() == [None, ("test.tgz", "wmt19")]
    (tmp_path / "wmt18-test.tgz").touch()
    assert found() == [("wmt18-test.tgz", "wmt18"), ("test.tgz", "wmt19")]
    for name in ("test.tgz", "wmt18-test.tgz"):
        (tmp_path / name).unlink()
    (tmp_path / "dev.tgz").touch()
    assert found() == [("dev.tgz", "wmt19"), None]
    (tmp_path / "wmt20-dev.tgz").touch()
    assert found() == [("dev.tgz", "wmt19"), ("wmt20-dev.tgz", "wmt20")]
