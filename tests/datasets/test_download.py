"""Downloads against a real server: mirrors, resuming, refusals, checksums.

The server's log of requests shows what was really asked for.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import pytest

from experiments.datasets import PrepareError, Unfit, download
from experiments.datasets.checksums import Checks, Digest, read_checksum_file
from experiments.datasets.download import Downloader, Remote
from helpers.data_server import Server, messages

BODY = random.Random(1).getrandbits(8 * 700_000).to_bytes(700_000, "big")
GOOD = Digest(len(BODY), "sha256", hashlib.sha256(BODY).hexdigest())


class Loader(Downloader):
    """Its files are used as they are."""

    def path(self, remote: Remote) -> Path:
        return self.get(remote, lambda path: path)


def downloader(folder: Path, checks: Checks | None = None, **kwargs: object) -> Loader:
    return Loader(folder, checks or Checks(), retries=1, wait=0.01, **kwargs)  # type: ignore[arg-type]


def test_resumes_an_interrupted_download(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = BODY
    server.break_off["/a.bin"] = [300_000, 200_000]
    path = downloader(tmp_path).path(Remote("a.bin", (server.url + "/a.bin",), GOOD))
    assert path.read_bytes() == BODY
    assert server.requests == [
        ("/a.bin", ""),
        ("/a.bin", "bytes=300000-"),
        ("/a.bin", "bytes=500000-"),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin"]


def test_a_later_run_resumes_the_part_file(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = BODY
    server.break_off["/a.bin"] = [1000, 0, 0, 0, 0]
    remote = Remote("a.bin", (server.url + "/a.bin",), GOOD)
    with pytest.raises(PrepareError, match=r"1000 bytes kept in a\.bin\.part"):
        downloader(tmp_path).path(remote)
    assert not (tmp_path / "a.bin").exists()
    server.break_off.clear()
    server.requests.clear()
    assert downloader(tmp_path).path(remote).read_bytes() == BODY
    assert server.requests == [("/a.bin", "bytes=1000-")]
    server.requests.clear()
    assert downloader(tmp_path).path(remote).read_bytes() == BODY
    assert server.requests == []  # verified once, not requested again


def test_a_server_that_refuses_any_range_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP 416 without a part to blame is no reason to stop: the next address is tried."""
    server.files["/b.bin"] = BODY
    stock = urllib.request.urlopen

    def answer(request: urllib.request.Request, timeout: float) -> object:
        if request.full_url.endswith("/a.bin"):
            raise urllib.error.HTTPError(request.full_url, 416, "Range", Message(), None)
        return stock(request, timeout=timeout)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    remote = Remote("a.bin", (server.url + "/a.bin", server.url + "/b.bin"), GOOD)
    assert downloader(tmp_path).path(remote).read_bytes() == BODY


def test_whole_file_when_range_is_ignored(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = BODY
    server.break_off["/a.bin"] = [5000]
    server.ignore_range = True
    path = downloader(tmp_path).path(Remote("a.bin", (server.url + "/a.bin",), GOOD))
    assert path.read_bytes() == BODY


def test_kept_bytes_of_another_version_are_deleted(server: Server, tmp_path: Path) -> None:
    other, good = "/other/a.bin", "/good/a.bin"
    server.files = {other: b"x" * len(BODY), good: BODY}
    server.break_off[other] = [4000, 0, 0, 0, 0]
    remote = Remote("a.bin", (server.url + other, server.url + good), GOOD)
    assert downloader(tmp_path).path(remote).read_bytes() == BODY
    assert server.requests[-2:] == [(good, "bytes=4000-"), (good, "")]


def test_browser_agent_passes_where_robots_get_403(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = BODY
    server.browsers_only = True
    remote = Remote("a.bin", (server.url + "/a.bin",), GOOD)
    assert downloader(tmp_path).path(remote).read_bytes() == BODY


def test_mirrors_are_tried_in_order(server: Server, tmp_path: Path) -> None:
    server.files = {"/3/a.bin": BODY, "/2/a.bin": b"a login page"}
    server.status["/1/a.bin"] = 403
    urls = tuple(f"{server.url}/{n}/a.bin" for n in (1, 2, 3, 4))
    assert downloader(tmp_path).path(Remote("a.bin", urls, GOOD)).read_bytes() == BODY
    assert [path for path, _ in server.requests] == ["/1/a.bin", "/2/a.bin", "/3/a.bin"]


def test_mirror_flag_replaces_the_addresses(server: Server, tmp_path: Path) -> None:
    server.files["/m/x/y/a.bin"] = BODY
    remote = Remote("a.bin", ("https://nowhere.invalid/x/y/a.bin",), GOOD)
    assert downloader(tmp_path, mirrors=[server.url + "/m/"]).path(remote).read_bytes() == BODY
    assert [path for path, _ in server.requests] == ["/m/x/y/a.bin"]


def test_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    bad = bytes([BODY[0] ^ 1]) + BODY[1:]
    server.files["/a.bin"] = bad
    with pytest.raises(PrepareError, match="wrong checksum: sha256 .* expected " + GOOD.value):
        downloader(tmp_path).path(Remote("a.bin", (server.url + "/a.bin",), GOOD))
    assert list(tmp_path.iterdir()) == []
    skip = Checks(frozenset({"a.bin"}))
    path = downloader(tmp_path, skip).path(Remote("a.bin", (server.url + "/a.bin",), GOOD))
    assert path.read_bytes() == bad


def test_every_reason_is_in_the_error(server: Server, tmp_path: Path) -> None:
    server.status = {"/1": 403, "/2": 503}
    with pytest.raises(PrepareError) as caught:
        downloader(tmp_path).path(Remote("a.bin", (server.url + "/1", server.url + "/2"), GOOD))
    text = str(caught.value)
    assert "HTTP 403" in text and "HTTP 503" in text
    assert "\n" not in text
    assert [path for path, _ in server.requests] == ["/1", "/2", "/2"]  # only 503 is retried


def test_unknown_host_is_not_retried(tmp_path: Path) -> None:
    remote = Remote("a.bin", ("http://nowhere.invalid/a.bin",), GOOD)
    with pytest.raises(PrepareError, match="host not found"):
        Loader(tmp_path, Checks(), retries=100, wait=30.0).path(remote)


def test_changed_file_on_disk_is_fetched_again(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = BODY
    remote = Remote("a.bin", (server.url + "/a.bin",), GOOD)
    path = downloader(tmp_path).path(remote)
    path.write_bytes(BODY[:-1])
    assert downloader(tmp_path).path(remote).read_bytes() == BODY


def test_a_changed_file_over_a_bad_connection_is_given_up(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = b"x" * len(BODY)
    server.break_off["/a.bin"] = [400_000, 10**9] * 10  # every transfer is interrupted once
    with pytest.raises(Unfit, match="wrong checksum"):
        downloader(tmp_path).path(Remote("a.bin", (server.url + "/a.bin",), GOOD))
    assert [asked for _, asked in server.requests] == ["", "bytes=400000-"] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_range_that_never_finishes(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = BODY
    server.ignore_range = True
    server.break_off["/a.bin"] = [
        400_000,
        300_000,
    ] * 10  # further than the last time, but not to the end
    with pytest.raises(PrepareError, match="attempt 2 of 2: interrupted after 400000 of 700000"):
        downloader(tmp_path).path(Remote("a.bin", (server.url + "/a.bin",), GOOD))
    assert len(server.requests) == 3


def test_another_length_is_refused_before_the_transfer(server: Server, tmp_path: Path) -> None:
    server.files = {"/long": BODY + b"x", "/page": b"a login page", "/good": BODY}
    server.break_off["/long"] = [1000] * 9
    server.break_off["/good"] = [5000, 0, 0]
    urls = tuple(server.url + path for path in ("/long", "/good"))
    with pytest.raises(Unfit, match="wrong size: 700001 bytes, expected 700000"):
        downloader(tmp_path).path(Remote("a.bin", urls, GOOD))
    assert server.requests[:2] == [("/long", ""), ("/good", "")]
    # Kept bytes survive answers of addresses that have another file.
    server.requests.clear()
    urls = tuple(server.url + path for path in ("/page", "/long", "/good"))
    assert downloader(tmp_path).path(Remote("a.bin", urls, GOOD)).read_bytes() == BODY
    assert server.requests == [(path, "bytes=5000-") for path in ("/page", "/long", "/good")]


def test_attempts_are_printed_and_failed_addresses_remembered(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["/3"] = BODY
    server.status = {"/1": 404, "/2": 503}
    server.break_off["/3"] = [1000]
    first, second, third = (f"{server.url}/{n}" for n in (1, 2, 3))
    loader = Loader(tmp_path, Checks(), retries=2, wait=0.01)
    for _ in range(3):
        with pytest.raises(PrepareError, match=r"/1: HTTP 404 .*/2: attempt 3 of 3: HTTP 503"):
            loader.path(Remote("a.bin", (first, second), GOOD))
    assert loader.path(Remote("b.bin", (second, third), GOOD)).read_bytes() == BODY
    assert [path for path, _ in server.requests] == ["/1", "/2", "/2", "/2", "/3", "/3"]
    assert messages(capsys.readouterr().err) == [
        f"{first}: HTTP 404 Not Found",
        f"{second}: attempt 1 of 3: HTTP 503",
        f"{second}: attempt 2 of 3: HTTP 503",
        f"{second}: attempt 3 of 3: HTTP 503",
        f"{third}: interrupted after 1000 of 700000 bytes; resuming",
    ]


def test_an_endless_answer_stops_at_the_known_size(server: Server, tmp_path: Path) -> None:
    """Chunked, so without a length; the documented file has 700,000 bytes."""
    server.files["/a.bin"] = BODY
    server.endless.add("/a.bin")
    with pytest.raises(Unfit, match="wrong size: more than the expected 700000 bytes"):
        downloader(tmp_path).path(Remote("a.bin", (server.url + "/a.bin",), GOOD))
    assert server.sent < 8_000_000
    assert not any(path.suffix in (".bin", ".part") for path in tmp_path.iterdir())


def test_an_endless_answer_without_a_known_size_leaves_room_on_the_disk(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/a.bin"] = BODY
    server.endless.add("/a.bin")
    free = shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(download, "_SPARE", free + 1)
    with pytest.raises(Unfit, match="GB needed"):
        downloader(tmp_path).path(Remote("a.bin", (server.url + "/a.bin",)))


@pytest.mark.parametrize("known", [GOOD, Digest()], ids=["checksum", "no checksum"])
def test_a_changed_file_is_not_glued_to_its_first_part(
    server: Server, tmp_path: Path, known: Digest
) -> None:
    """The server ignores If-Range, and says by its ETag that the rest is of another file."""
    server.files["/a.bin"] = b"x" * len(BODY)
    server.etags["/a.bin"] = '"old"'
    server.break_off["/a.bin"] = [300_000, 0, 0]
    remote = Remote("a.bin", (server.url + "/a.bin",), known)
    with pytest.raises(PrepareError, match="300000 bytes kept"):
        downloader(tmp_path).path(remote)
    server.files["/a.bin"], server.etags["/a.bin"] = BODY, '"new"'
    server.break_off.clear()
    server.requests.clear()
    assert downloader(tmp_path).path(remote).read_bytes() == BODY
    assert [asked for _, asked in server.requests] == ["bytes=300000-", ""]


def test_checksum_file_takes_all_three_kinds(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    path.write_text(f"{'a' * 64}  x/one\n{'B' * 40} *two\n# note\n{'c' * 32}  three\n")
    assert read_checksum_file(path) == {
        "one": Digest(None, "sha256", "a" * 64),
        "two": Digest(None, "sha1", "b" * 40),
        "three": Digest(None, "md5", "c" * 32),
    }
    path.write_text("abc one\n")
    with pytest.raises(PrepareError, match="line 1"):
        read_checksum_file(path)
