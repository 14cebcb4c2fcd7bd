"""Where the files of a data set come from: a folder of the user, or the network.

Both ways end in the same place: a path to each wanted file, checked.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence

from fairseq_dpq.datasets.archives import extract
from fairseq_dpq.datasets.checksums import UNKNOWN, Checks, Digest, hash_file
from fairseq_dpq.datasets.download import Downloader, Remote
from fairseq_dpq.datasets.errors import PrepareError


@dataclass(frozen=True)
class Route:
    """One way to a file: a download that is the file, or that holds it as `member`."""

    remote: Remote
    member: str | None = None


@dataclass(frozen=True)
class Wanted:
    """A file that a data set needs; `aliases` are other names for the same bytes."""

    name: str
    routes: tuple[Route, ...]
    digest: Digest = UNKNOWN
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Held:
    """A wanted file at hand: `path` is the file itself, or the archive that `route` opens."""

    path: Path
    route: Route | None = None


class Sources:
    """Finds wanted files in `folder` (--from), or downloads them under `work`."""

    def __init__(self, folder: Path | None, work: Path, downloader: Downloader) -> None:
        self.folder = folder
        self.work = work
        self.downloader = downloader
        if folder is not None and not folder.is_dir():
            raise PrepareError(f"--from {folder}: no such folder")

    @property
    def checks(self) -> Checks:
        return self.downloader.checks

    def locate(self, wanted: Wanted) -> Held | None:
        """The file in --from, or an archive there that holds it."""
        assert self.folder is not None
        names = [wanted.name, *wanted.aliases]
        names += [r.member for r in wanted.routes if r.member and "*" not in r.member]
        for name in names:
            if (self.folder / name).is_file():
                return Held(self.folder / name)
        for route in wanted.routes:
            if route.member is None:
                continue
            for name in [route.remote.name, *(u.rsplit("/", 1)[-1] for u in route.remote.urls)]:
                if (self.folder / name).is_file():
                    return Held(self.folder / name, route)
        return None

    def fetch(self, wanted: Sequence[Wanted]) -> dict[str, Held]:
        """Find or download every wanted file, checked but not yet unpacked."""
        if self.folder is None:
            return {item.name: self._network(item) for item in wanted}
        self._require_all(wanted)  # before any time goes into checksums
        return {item.name: self._local(item) for item in wanted}

    def unpack(self, held: Mapping[str, Held], wanted: Sequence[Wanted]) -> dict[str, Path]:
        """Paths of the files themselves; each archive is read once."""
        paths: dict[str, Path] = {}
        for item in wanted:
            archive, route = held[item.name].path, held[item.name].route
            if route is None:
                paths[item.name] = archive
            elif item.name not in paths:
                paths.update(self._extract(archive, held, wanted))
        return paths

    def hashes(self, held: Mapping[str, Held]) -> dict[str, str]:
        """SHA-256 of every file or archive in use, by file name: the inputs of a stamp."""
        paths = {item.path for item in held.values()}
        return {path.name: self._hash(path) for path in sorted(paths)}

    def _require_all(self, wanted: Sequence[Wanted]) -> None:
        missing = [item for item in wanted if self.locate(item) is None]
        if missing:
            routes = [route for item in missing for route in item.routes if route.member]
            archives = list(dict.fromkeys(route.remote.name for route in routes))
            also = f" (nor {', '.join(archives)})" if archives else ""
            names = ", ".join(item.name for item in missing)
            raise PrepareError(f"--from {self.folder}: no {names}{also}")

    def _local(self, item: Wanted) -> Held:
        held = self.locate(item)
        assert held is not None
        if held.route is None:
            self.checks.require(held.path, item.name, item.digest)
        else:
            self.checks.require(held.path, held.route.remote.name, held.route.remote.digest)
        return held

    def _network(self, item: Wanted) -> Held:
        reasons: list[str] = []
        for route in item.routes:
            try:
                path = self.downloader.get(route.remote)
            except PrepareError as error:
                reasons.append(str(error))
                continue
            return Held(path, route if route.member is not None else None)
        hint = "run again to resume, or pass --from DIR with the files in it"
        raise PrepareError(f"{'; '.join(reasons)} ({hint})")

    def _extract(
        self, archive: Path, held: Mapping[str, Held], wanted: Sequence[Wanted]
    ) -> dict[str, Path]:
        folder = self.work / "extracted" / archive.name
        holds = [item for item in wanted if held[item.name].path == archive]
        members: dict[str, Path] = {}
        for item in holds:
            route = held[item.name].route
            assert route is not None and route.member is not None
            members[route.member] = folder / item.name
        extract(archive, members)
        for item in holds:
            try:
                self.checks.require(folder / item.name, item.name, item.digest)
            except PrepareError as error:
                raise PrepareError(f"{error} (out of {archive})") from error
        return {item.name: folder / item.name for item in holds}

    def _hash(self, path: Path) -> str:
        """The file's SHA-256; that of a large file is remembered for as long as it is unchanged."""
        stat = path.stat()
        if stat.st_size < 1 << 26:
            return hash_file(path)
        index = self.work / "hashes.json"
        try:
            known = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in known:
            known[key] = hash_file(path)
            fresh = index.with_name(index.name + ".tmp")
            fresh.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
            os.replace(fresh, index)
        return str(known[key])
