"""Where the files of a data set come from: a local folder or the network.

Both give a path to each wanted file, with its checksum verified.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable, Mapping, Sequence, Tuple, TypeVar

from experiments.datasets.archives import extract
from experiments.datasets.checksums import UNKNOWN, Checks, Digest
from experiments.datasets.checksums import known as known_digest
from experiments.datasets.download import Downloader, Remote
from experiments.datasets.errors import PrepareError, Rejected, Unfit

T = TypeVar("T")
_Choice = Tuple[str, bool, Callable[[], T]]  # its name, whether a checksum is known, the attempt


@dataclass(frozen=True)
class Route:
    """One way to get a file: a download that is the file, or that contains it as `member`."""

    remote: Remote
    member: str | None = None


@dataclass(frozen=True)
class RequiredFile:
    """A file that a data set needs; `aliases` are other names for the same bytes."""

    name: str
    routes: tuple[Route, ...]
    digest: Digest = UNKNOWN
    aliases: tuple[str, ...] = ()


def remote(data: str, name: str, *urls: str) -> Remote:
    """A download of a data set; {} in an address stands for its name."""
    return Remote(name, tuple(url.replace("{}", name) for url in urls), known_digest(data, name))


def required(
    data: str,
    name: str,
    urls: Sequence[str] = (),
    archives: Sequence[tuple[Remote, str]] = (),
    aliases: tuple[str, ...] = (),
    archives_first: bool = False,
) -> RequiredFile:
    """A file of a data set that is at `urls`, or in `archives` as the member beside each."""
    routes = [Route(archive, member) for archive, member in archives]
    plain = [Route(remote(data, name, *urls))] if urls else []
    ordered = [*routes, *plain] if archives_first else [*plain, *routes]
    return RequiredFile(name, tuple(ordered), known_digest(data, name), aliases)


@dataclass(frozen=True)
class Held:
    """A wanted file on disk: `path` is the file itself, or the archive of `route`."""

    path: Path
    route: Route | None = None
    downloaded: bool = False

    @property
    def member(self) -> str | None:
        return None if self.route is None else self.route.member


class Sources:
    """Finds wanted files in `folder` (--from), or downloads them under `work`."""

    def __init__(self, folder: Path | None, work: Path, downloader: Downloader) -> None:
        self.folder = folder
        self.work = work
        self.downloader = downloader
        self.used: dict[str, Held] = {}  # everything that was fetched and not rejected
        self._said: set[str] = set()
        if folder is not None and not folder.is_dir():
            raise PrepareError(f"--from {folder}: no such folder")

    @property
    def checks(self) -> Checks:
        return self.downloader.checks

    def locate(self, wanted: RequiredFile) -> Held | None:
        """The file in --from, or an archive there that contains it."""
        assert self.folder is not None
        names = [wanted.name, *wanted.aliases]
        names += [r.member for r in wanted.routes if r.member and "*" not in r.member]
        for name in names:
            if (self.folder / name).is_file():
                return Held(self.folder / name)
        for route in wanted.routes:
            if route.member is None:
                continue
            # Not by the last part of an address: WMT18 and WMT19 both have a test.tgz.
            if (self.folder / route.remote.name).is_file():
                return Held(self.folder / route.remote.name, route)
        return None

    def obtain(self, wanted: Sequence[RequiredFile]) -> dict[str, Path]:
        """Fetch and unpack; if a download cannot be unpacked, the next one is tried."""
        while True:
            with suppress(Rejected):  # no address is tried twice, so this terminates
                return self.unpack(self.fetch(wanted), wanted)

    def fetch(self, wanted: Sequence[RequiredFile]) -> dict[str, Held]:
        """Find or download every wanted file, verified but not yet unpacked."""
        return self.fetch_first([wanted])[1]

    def fetch_first(self, forms: Sequence[Sequence[RequiredFile]]) -> tuple[int, dict[str, Held]]:
        """The first available of several forms of a text: its index and its files."""
        if self.folder is not None:
            self._require_all(forms[0])  # before spending time on checksums
            found = 0, {item.name: self._local(item) for item in forms[0]}
        else:
            hint = "run again to resume, or pass --from DIR with the files in it"
            try:
                found = self._first([self._form(*form) for form in enumerate(forms)])
            except PrepareError as error:
                raise PrepareError(f"{error} ({hint})") from error
        self.used.update(found[1])
        return found

    def checked(self, held: Mapping[str, Held], wanted: Sequence[RequiredFile]) -> bool:
        """Whether checksums show that all of these files are the documented ones."""
        found = [(item, held[item.name].route) for item in wanted]
        return all(route is not None and self._known(item, route) for item, route in found)

    def reject(
        self, held: Mapping[str, Held], wanted: Sequence[RequiredFile], error: Exception
    ) -> None:
        """These files cannot be used: if they were downloaded, others are tried."""
        known = False
        remotes: dict[Remote, None] = {}
        for item in wanted:
            found = held[item.name]
            if found.route is None or not found.downloaded:
                return
            known = known or self._known(item, found.route)
            remotes[found.route.remote] = None
            self.used.pop(item.name, None)
        for remote in remotes:
            self.downloader.reject(remote, str(error), wrong=known)
        raise Rejected(str(error)) from error

    def unpack(self, held: Mapping[str, Held], wanted: Sequence[RequiredFile]) -> dict[str, Path]:
        """Paths of the files themselves; each archive is read once."""
        paths: dict[str, Path] = {}
        for item in wanted:
            archive = held[item.name].path
            if held[item.name].member is None:
                paths[item.name] = archive
            elif item.name not in paths:
                holds = [other for other in wanted if held[other.name].path == archive]
                try:
                    paths.update(self._extract(archive, held, holds))
                except PrepareError as error:
                    self.reject(held, holds, error)
                    raise
        return paths

    def hashes(self, held: Mapping[str, Held]) -> dict[str, str]:
        """SHA-256 of every file or archive in use, by file name: the inputs of a stamp."""
        paths = {item.path for item in held.values()}
        return {path.name: self.checks.hash(path) for path in sorted(paths)}

    def _require_all(self, wanted: Sequence[RequiredFile]) -> None:
        missing = [item for item in wanted if self.locate(item) is None]
        if missing:
            routes = [route for item in missing for route in item.routes if route.member]
            archives = list(dict.fromkeys(route.remote.name for route in routes))
            also = f" (nor {', '.join(archives)})" if archives else ""
            names = ", ".join(item.name for item in missing)
            raise PrepareError(f"--from {self.folder}: no {names}{also}")

    def _local(self, item: RequiredFile) -> Held:
        held = self.locate(item)
        assert held is not None
        if held.route is None:
            self.checks.require(held.path, item.name, item.digest)
        else:
            self.checks.require(held.path, held.route.remote.name, held.route.remote.digest)
        return held

    def _known(self, item: RequiredFile, route: Route) -> bool:
        """Whether a known checksum verifies the file of this route."""
        digests = [self.checks.digest(route.remote.name, route.remote.digest)]
        if route.member is not None:
            digests.append(self.checks.digest(item.name, item.digest))
        return any(digest.best() is not None for digest in digests)

    def _form(
        self, index: int, wanted: Sequence[RequiredFile]
    ) -> _Choice[tuple[int, dict[str, Held]]]:
        routes = [(item, route) for item in wanted for route in item.routes]
        name = ", ".join(dict.fromkeys(item.routes[0].remote.name for item in wanted))
        known = all(self._known(item, route) for item, route in routes)
        return name, known, lambda: (index, {item.name: self._network(item) for item in wanted})

    def _network(self, item: RequiredFile) -> Held:
        def attempt(route: Route) -> Held:
            return Held(self.downloader.get(route.remote), route, downloaded=True)

        return self._first(
            [(r.remote.name, self._known(item, r), partial(attempt, r)) for r in item.routes]
        )

    def _first(self, choices: Sequence[_Choice[T]]) -> T:
        """The first choice that works.

        After wrong bytes or a full disk, no file without a known checksum is used instead.
        """
        reasons: list[str] = []
        failure = ""
        careful = False
        for name, known, attempt in choices:
            if careful and not known:
                reasons.append(f"{name} is not used instead, because it has no known checksum")
                continue
            if failure:
                doubt = "" if known else " (it has no known checksum)"
                self._say(f"{failure}; trying {name} instead{doubt}")
            try:
                return attempt()
            except PrepareError as error:
                careful = careful or isinstance(error, Unfit)
                failure = str(error)
                reasons.append(failure)
        raise (Unfit if careful else PrepareError)("; ".join(reasons))

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            print(message, file=sys.stderr)

    def _extract(
        self, archive: Path, held: Mapping[str, Held], holds: Sequence[RequiredFile]
    ) -> dict[str, Path]:
        folder = self.work / "extracted" / archive.name
        members: dict[str, Path] = {}
        for item in holds:
            member = held[item.name].member
            assert member is not None
            members[member] = folder / item.name
        extract(archive, members)
        for item in holds:
            try:
                self.checks.require(folder / item.name, item.name, item.digest)
            except PrepareError as error:
                raise PrepareError(f"{error} (from {archive})") from error
        return {item.name: folder / item.name for item in holds}
