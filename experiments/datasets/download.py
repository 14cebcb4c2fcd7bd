"""Downloads: addresses are tried in order, resumed by Range, verified, then renamed into place.

An interrupted download is kept as NAME.part, and the next run resumes it.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

from tqdm import tqdm

from experiments.datasets.checksums import UNKNOWN, Checks, Digest
from experiments.datasets.errors import PrepareError, Unfit
from fairseq_dpq.runs.folder import read_json

# Two of the hosts answer 403 to Python's default User-Agent.
USER_AGENT = (
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) "
    "Chrome/124.0.0.0 Safari/537.36"
)
_BLOCK = 1 << 18
_SPARE = 1 << 30  # bytes of the disk that a file of unknown size leaves free
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Remote:
    """A file on the network: its name on disk, its addresses in order, its digest."""

    name: str
    urls: tuple[str, ...]
    digest: Digest = UNKNOWN


class _GiveUp(Exception):
    """This address cannot serve the file; the next one may."""


class _Wrong(_GiveUp):
    """This address serves bytes other than the documented ones."""


class _TryAgain(Exception):
    """The connection failed; the same address may work on a retry."""


def progress(total: int | None, label: str, unit: str = "B", initial: int = 0) -> Any:
    """A progress bar on stderr, redrawn less often if stderr is a log file."""
    return tqdm(
        total=total,
        initial=initial,
        desc=label,
        unit=unit,
        unit_scale=True,
        file=sys.stderr,
        leave=False,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    )


class Downloader:
    """Fetches `Remote`s into one folder. An address that failed is not tried again."""

    def __init__(
        self,
        folder: Path,
        checks: Checks,
        mirrors: Sequence[str] = (),
        retries: int = 4,
        timeout: float = 20.0,
        wait: float = 1.0,
    ) -> None:
        self.folder = folder
        self.checks = checks
        self.mirrors = tuple(mirrors)
        self.retries = retries
        self.timeout = timeout
        self.wait = wait
        self._failed: dict[str, tuple[str, bool]] = {}  # address -> reason, wrong bytes?
        self._unfit: dict[str, str] = {}  # file name -> why the documented file cannot be used
        self._origin: dict[str, str] = {}  # name -> the address it came from in this run

    def addresses(self, remote: Remote) -> list[str]:
        """What to try: under each --mirror by path, then by name; else the built-in URLs."""
        if not self.mirrors:
            return list(remote.urls)
        found: list[str] = []
        paths = [urllib.parse.urlsplit(url).path for url in remote.urls]
        for mirror in self.mirrors:
            found += [mirror.rstrip("/") + path for path in [*paths, "/" + remote.name]]
        return list(dict.fromkeys(found))

    def get(self, remote: Remote) -> Path:
        """The verified file, downloaded if it is not there yet."""
        if remote.name in self._unfit:
            raise Unfit(self._unfit[remote.name])
        target = self.folder / remote.name
        digest = self.checks.digest(remote.name, remote.digest)
        if target.exists():
            reason = self.checks.mismatch(target, digest)
            if reason is None:
                return target
            print(f"{target}: {reason}; fetching it again", file=sys.stderr)
            target.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        addresses = self.addresses(remote)
        for url in addresses:
            if url in self._failed:
                continue
            try:
                self._from_address(url, target, digest)
            except _GiveUp as error:
                self._failed[url] = str(error), isinstance(error, _Wrong)
                print(f"{url}: {error}", file=sys.stderr)
                continue
            self._origin[remote.name] = url
            return target
        reasons = "; ".join(f"{url}: {self._failed[url][0]}" for url in addresses)
        wrong = any(self._failed[url][1] for url in addresses)
        raise (Unfit if wrong else PrepareError)(f"cannot download {remote.name}: {reasons}")

    def reject(self, remote: Remote, reason: str, wrong: bool) -> None:
        """Delete a file that cannot be used; the next `get` tries the next address."""
        target = self.folder / remote.name
        digest = self.checks.digest(remote.name, remote.digest)
        if digest.best() is not None and self.checks.mismatch(target, digest) is None:
            # It is the documented file: every address serves the same one.
            self._unfit[remote.name] = reason
            return
        target.unlink()
        url = self._origin.pop(remote.name, None)
        if url is not None:
            self._failed[url] = reason, wrong
        print(f"{url or target}: {reason}; deleted", file=sys.stderr)

    def _from_address(self, url: str, target: Path, digest: Digest) -> None:
        part = target.with_name(target.name + ".part")
        failures = 0
        restarted = False
        furthest = self._start(part, url, digest)
        while True:
            resumed = self._start(part, url, digest)
            try:
                self._transfer(url, part, resumed, target.name, digest)
            except _TryAgain as error:
                now = part.stat().st_size if part.exists() else 0
                # Only attempts without progress count: a bad connection may need many resumes.
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
            if reason is None:
                os.replace(part, target)
                self._meta(part).unlink(missing_ok=True)
                return
            part.unlink()
            self._meta(part).unlink(missing_ok=True)
            if restarted or not resumed:
                raise _Wrong(reason)
            # The kept part may be from another version of the file.
            print(f"{url}: {reason}; restarting from byte 0", file=sys.stderr)
            restarted, furthest = True, 0

    def _start(self, part: Path, url: str, digest: Digest) -> int:
        """How many bytes of NAME.part can be kept."""
        meta = read_json(self._meta(part))
        if not part.exists() or not meta:
            return 0
        # Without a checksum to detect a mixture, a file is only resumed from the same address.
        if meta.get("url") != url and digest.best() is None:
            return 0
        return part.stat().st_size

    def _transfer(self, url: str, part: Path, offset: int, label: str, digest: Digest) -> None:
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
        meta = read_json(self._meta(part)) or {}
        old_tag = str(meta.get("etag") or "") if meta.get("url") == url else ""
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if old_tag and not old_tag.startswith("W/"):
                headers["If-Range"] = old_tag
        with self._answer(url, headers, part, offset, digest) as response:
            if response is None:
                return  # all of it is there
            tag = response.headers.get("ETag") or ""
            if offset and response.status == 206:
                expected = f"bytes {offset}-"
                if not (response.headers.get("Content-Range") or "").startswith(expected):
                    part.unlink()
                    raise _TryAgain("the server resumed at another byte")
                if old_tag and tag and tag != old_tag:  # a server that ignores If-Range
                    part.unlink()
                    raise _TryAgain("the file has changed since its first bytes were fetched")
            else:
                offset = 0  # the server sends the whole file
            length = response.headers.get("Content-Length")
            total = digest.size
            if length and length.isdigit():
                total = offset + int(length)
                self._check_size(total, digest)
            self._check_room(part, (total or 0) - offset)
            self._meta(part).write_text(json.dumps({"url": url, "etag": tag}), encoding="utf-8")
            done = self._copy(response, part, offset, total, label)
        if total is not None and done < total:
            raise _TryAgain(f"interrupted after {done} of {total} bytes")

    @contextlib.contextmanager
    def _answer(
        self, url: str, headers: dict[str, str], part: Path, offset: int, digest: Digest
    ) -> Iterator[Any]:
        """The server's answer; None if it says that NAME.part is the whole file."""
        try:
            request = urllib.request.Request(url, headers=headers)
            response = urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416 and offset:
                    whole = (error.headers.get("Content-Range") or "").rpartition("/")[2]
                    if whole == str(offset):
                        yield None
                        return
                    if whole.isdigit():
                        self._check_size(int(whole), digest)
                    part.unlink()
                    raise _TryAgain("the kept part is longer than the file") from error
                if error.code in _TRANSIENT:
                    raise _TryAgain(f"HTTP {error.code}") from error
                raise _GiveUp(f"HTTP {error.code} {error.reason}") from error
        except ValueError as error:
            raise _GiveUp(f"not a usable address: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), socket.gaierror):
                raise _GiveUp("host not found") from error  # retrying rarely helps
            raise _TryAgain(f"no connection ({getattr(error, 'reason', error)})") from error
        with response:
            yield response

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
                    self._check_room(part, _SPARE)
                out.write(block)
                bar.update(len(block))

    def _check_size(self, whole: int, digest: Digest) -> None:
        """Refuse a file of another length before the transfer; kept bytes stay."""
        if digest.size is not None and whole != digest.size:
            raise _Wrong(f"wrong size: {whole} bytes, expected {digest.size}")

    def _check_room(self, part: Path, needed: int) -> None:
        free = shutil.disk_usage(part.parent).free
        if needed > free:
            raise Unfit(
                f"{part.parent}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; "
                "pass --work DIR on a larger disk"
            )

    @staticmethod
    def _meta(part: Path) -> Path:
        return part.with_name(part.name + ".json")
