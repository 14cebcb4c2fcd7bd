"""Downloads: addresses are tried in order, resumed by Range, verified, then renamed into place.

An interrupted download is kept as NAME.part, and the next run resumes it.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Sequence, TypeVar

from tqdm import tqdm

from experiments.datasets import PrepareError, Unfit
from experiments.datasets.checksums import UNKNOWN, Checks, Digest
from fairseq_dpq.runs.folder import read_json

T = TypeVar("T")
# Two of the hosts answer 403 to Python's default User-Agent.
USER_AGENT = (
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) "
    "Chrome/124.0.0.0 Safari/537.36"
)
_BLOCK = 1 << 18
_TIMEOUT = 20.0  # seconds
_SPARE = 1 << 30  # bytes of the disk that a file of unknown size leaves free
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Remote:
    """A file on the network: its name on disk, its addresses in order, its digest, and the member
    that is wanted if it is an archive."""

    name: str
    urls: tuple[str, ...]
    digest: Digest = UNKNOWN
    member: str | None = None


class _GiveUp(Exception):
    """This address cannot serve the file; the next one may."""


class _Wrong(_GiveUp):
    """This address serves bytes other than the documented ones."""


class _TryAgain(Exception):
    """The connection failed; the same address may work on a retry."""


def progress(total: int | None, label: str, unit: str = "B", initial: int = 0) -> Any:
    """A progress bar on stderr, redrawn less often if stderr is a log file."""
    pause = 0.5 if sys.stderr.isatty() else 30.0
    size = {"total": total, "initial": initial, "unit": unit, "unit_scale": True}
    return tqdm(desc=label, leave=False, mininterval=pause, **size)


@dataclass
class Downloader:
    """Fetches `Remote`s into one folder. An address that failed is not tried again."""

    folder: Path
    checks: Checks
    mirrors: Sequence[str] = ()
    retries: int = 4
    wait: float = 1.0  # seconds before the first retry
    _failed: dict[str, Exception] = field(default_factory=dict)  # by address

    def addresses(self, remote: Remote) -> list[str]:
        """What to try: under each --mirror by path, then by name; else the built-in URLs."""
        if not self.mirrors:
            return list(remote.urls)
        found: list[str] = []
        paths = [urllib.parse.urlsplit(url).path for url in remote.urls]
        for mirror in self.mirrors:
            found += [mirror.rstrip("/") + path for path in [*paths, "/" + remote.name]]
        return list(dict.fromkeys(found))

    def get(self, remote: Remote, use: Callable[[Path], T], known: bool = False) -> T:
        """`use` of the verified file, downloaded if it is not there yet.

        A file without a known checksum that `use` raises PrepareError for is deleted, and the next
        address is tried; `known`: it had other bytes than those that are known.
        """
        target = self.folder / remote.name
        digest = self.checks.digest(remote.name, remote.digest)
        addresses = self.addresses(remote)
        if target.exists():
            reason = self.checks.mismatch(target, digest)
            if reason is None:
                addresses.insert(0, str(target))
            else:
                print(f"{target}: {reason}; fetching it again", file=sys.stderr)
                target.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        for place in addresses:
            if place in self._failed:
                continue
            try:
                if place != str(target):
                    self._from_address(place, target, digest)
                return use(target)
            except _GiveUp as error:
                self._failed[place] = error
                print(f"{place}: {error}", file=sys.stderr)
            except PrepareError as error:
                if isinstance(error, Unfit) or digest.algorithm:
                    # It is the documented file: every address serves the same one.
                    raise Unfit(str(error)) from error
                target.unlink(missing_ok=True)
                if place != str(target):
                    self._failed[place] = _Wrong(str(error)) if known else error
                print(f"{place}: {error}; deleted", file=sys.stderr)
        failed = {url: self._failed[url] for url in addresses if url in self._failed}
        reasons = "; ".join(f"{url}: {error}" for url, error in failed.items())
        kind = Unfit if any(isinstance(e, _Wrong) for e in failed.values()) else PrepareError
        raise kind(f"cannot download {remote.name}: {reasons}")

    def _from_address(self, url: str, target: Path, digest: Digest) -> None:
        """Download to `target`. Only attempts without progress count: a bad connection may need
        many resumes."""
        part = target.with_name(target.name + ".part")
        failures, restarted = 0, False
        furthest = self._start(part, url, digest)
        while True:
            resumed = self._start(part, url, digest)
            try:
                if digest.size is None or resumed < digest.size:
                    self._transfer(url, part, resumed, target.name, digest)
            except _TryAgain as error:
                now = part.stat().st_size if part.exists() else 0
                failures = 0 if now > furthest else failures + 1
                furthest = max(furthest, now)
                attempt = f"attempt {failures} of {self.retries + 1}: {error}"
                if failures > self.retries:
                    kept = f"; {now} bytes kept in {part.name}" if now else ""
                    raise _GiveUp(f"{attempt}{kept}") from error
                print(f"{url}: {attempt if failures else f'{error}; resuming'}", file=sys.stderr)
                time.sleep(min(30.0, self.wait * 2 ** min(failures, 5)))
                continue
            reason = self.checks.mismatch(part, digest)
            self._meta(part).unlink(missing_ok=True)
            if reason is None:
                os.replace(part, target)
                return
            part.unlink()
            if restarted or not resumed:
                raise _Wrong(reason)
            # The kept part may be from another version of the file.
            print(f"{url}: {reason}; restarting from byte 0", file=sys.stderr)
            restarted, furthest = True, 0

    def _start(self, part: Path, url: str, digest: Digest) -> int:
        """How many bytes of NAME.part can be kept. Without a checksum to detect a mixture, a file
        is only resumed from the same address."""
        meta = read_json(self._meta(part)) or {}
        same = meta.get("url") == url or (meta and digest.algorithm)
        return part.stat().st_size if same and part.exists() else 0

    def _transfer(self, url: str, part: Path, offset: int, label: str, digest: Digest) -> None:
        """Append what the server sends to NAME.part, or replace it."""
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
        meta = read_json(self._meta(part)) or {}
        old_tag = str(meta.get("etag") or "") if meta.get("url") == url else ""
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if old_tag and not old_tag.startswith("W/"):
                headers["If-Range"] = old_tag
        with self._open(url, headers, part, digest) as response:
            tag = response.headers.get("ETag") or ""
            if offset and response.status == 206:
                resumed_at = response.headers.get("Content-Range") or ""
                changed = old_tag and tag and tag != old_tag  # a server that ignores If-Range
                if changed or not resumed_at.startswith(f"bytes {offset}-"):
                    part.unlink()
                    raise _TryAgain("the file has changed since its first bytes were fetched")
            else:
                offset = 0  # the server sends the whole file
            length = response.headers.get("Content-Length") or ""
            total = offset + int(length) if length.isdigit() else digest.size
            _check_size(total, digest)
            _check_room(part, (total or 0) - offset)
            self._meta(part).write_text(json.dumps({"url": url, "etag": tag}), encoding="utf-8")
            done = self._copy(response, part, offset, total, label)
        if total is not None and done < total:
            raise _TryAgain(f"interrupted after {done} of {total} bytes")

    def _open(self, url: str, headers: dict[str, str], part: Path, digest: Digest) -> Any:
        """The server's answer."""
        try:
            request = urllib.request.Request(url, headers=headers)
            return urllib.request.urlopen(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and part.exists():
                whole = (error.headers.get("Content-Range") or "").rpartition("/")[2]
                _check_size(int(whole) if whole.isdigit() else None, digest)
                part.unlink()
                raise _TryAgain("the kept part is as long as the file, or longer") from error
            if error.code in _TRANSIENT:
                raise _TryAgain(f"HTTP {error.code}") from error
            raise _GiveUp(f"HTTP {error.code} {error.reason}") from error
        except ValueError as error:
            raise _GiveUp(f"not a usable address: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), socket.gaierror):
                raise _GiveUp("host not found") from error  # retrying rarely helps
            raise _TryAgain(f"no connection ({getattr(error, 'reason', error)})") from error

    def _copy(self, response: Any, part: Path, offset: int, total: int | None, label: str) -> int:
        """Append the answer to NAME.part; never more than `total` bytes, or than the disk has."""
        done = offset
        with open(part, "ab" if offset else "wb") as out, progress(
            total, label, initial=offset
        ) as bar:
            while True:
                try:
                    block = response.read(_BLOCK)
                except http.client.IncompleteRead as error:
                    out.write(error.partial)
                    raise _TryAgain(f"interrupted after {done} bytes") from error
                except (OSError, http.client.HTTPException) as error:
                    raise _TryAgain(f"interrupted after {done} bytes ({error})") from error
                if not block:
                    return done
                done += len(block)
                if total is not None and done > total:
                    part.unlink()
                    raise _Wrong(f"wrong size: more than the expected {total} bytes")
                if total is None and done % (1 << 26) < len(block):
                    _check_room(part, _SPARE)
                out.write(block)
                bar.update(len(block))

    @staticmethod
    def _meta(part: Path) -> Path:
        return part.with_name(part.name + ".json")


def _check_size(whole: int | None, digest: Digest) -> None:
    """Refuse a file of another length before the transfer; kept bytes stay."""
    if whole is not None and digest.size not in (None, whole):
        raise _Wrong(f"wrong size: {whole} bytes, expected {digest.size}")


def _check_room(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise Unfit(
            f"{part.parent}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; "
            "pass --work DIR on a larger disk"
        )
