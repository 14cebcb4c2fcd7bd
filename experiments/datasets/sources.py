"""Where the files of a data set come from: a local folder, or the network see files.txt.

Both give a path to each wanted file, with its checksum verified.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Sequence, Tuple, TypeVar

from experiments.datasets import PrepareError, Unfit
from experiments.datasets.archives import extract
from experiments.datasets.checksums import UNKNOWN, Digest
from experiments.datasets.download import Downloader, Remote

T = TypeVar("T")
_PLACE = re.compile(r"(?:([\w.-]+)=)?(https?://[^!]+)(?:!(.+))?")


@dataclass(frozen=True)
class RequiredFile:
    """A file that a data set needs, and the downloads that are or contain it; `aliases` are other
    paths in the folder of --from."""

    name: str
    routes: tuple[Remote, ...]
    digest: Digest = UNKNOWN
    aliases: tuple[str, ...] = ()


Choice = Tuple[RequiredFile, Remote]


@lru_cache(maxsize=None)
def _section(data: str) -> tuple[dict[str, Digest], dict[str, list[str]]]:
    """What files.txt says of a data set: digests and places by file, "" for those of all."""
    text = Path(__file__).with_name("files.txt").read_text(encoding="utf-8")
    digests: dict[str, Digest] = {}
    name = ""
    places: dict[str, list[str]] = {name: []}
    for line in text.partition(f"\n[{data}]\n")[2].partition("\n[")[0].splitlines():
        if line.startswith(" "):
            places[name].append(line.strip())
        elif line:
            name, *facts = line.split()
            size = int(facts[0]) if facts and facts[0] != "-" else None
            digests[name] = Digest(size, *(facts[1].split(":") if facts[1:] else ()))
            places[name] = []
    return digests, places


def required(data: str, name: str) -> RequiredFile:
    """A file of a data set, as files.txt describes it."""
    digests, places = _section(data)
    aliases: list[str] = []
    urls: dict[tuple[str, str | None], list[str]] = {}  # by the download and the member
    for place in places[""] + places.get(name, []):
        found = _PLACE.fullmatch(place.replace("{}", name))
        if found is None:
            aliases.append(place.replace("{}", name))
        else:
            own, url, member = found.groups()
            packed = own or url.rpartition("/")[2]
            urls.setdefault((packed if member else name, member), []).append(url)
    routes = [
        Remote(file, tuple(found), digests.get(file, UNKNOWN), member)
        for (file, member), found in urls.items()
    ]
    return RequiredFile(name, tuple(routes), digests.get(name, UNKNOWN), tuple(aliases))


@dataclass
class Sources:
    """Finds wanted files in `folder` (--from), or downloads them under `work`."""

    folder: Path | None
    work: Path
    downloader: Downloader
    optional: str = ""  # the flag that leaves out a part of the data set
    used: dict[str, Path] = field(default_factory=dict)  # by wanted file, it or its archive

    def __post_init__(self) -> None:
        self.checks = self.downloader.checks
        if self.folder is not None and not self.folder.is_dir():
            raise PrepareError(f"--from {self.folder}: no such folder")

    def locate(self, wanted: RequiredFile) -> tuple[Path, Remote] | None:
        """The file in --from, or an archive there that contains it, and its route."""
        assert self.folder is not None
        members = [r.member for r in wanted.routes if r.member and "*" not in r.member]
        for name in [wanted.name, *wanted.aliases, *members]:
            if (self.folder / name).is_file():
                return self.folder / name, Remote(wanted.name, (), wanted.digest)
        for route in wanted.routes:
            # Not by the last part of an address: WMT18 and WMT19 both have a test.tgz.
            if route.member is not None and (self.folder / route.name).is_file():
                return self.folder / route.name, route
        return None

    def local(self, wanted: Sequence[RequiredFile]) -> dict[str, tuple[Path, Remote]]:
        """Every wanted file in --from, verified but not yet unpacked."""
        found = {item.name: place for item in wanted if (place := self.locate(item))}
        missing = [item for item in wanted if item.name not in found]
        if missing:
            routes = [route for item in missing for route in item.routes if route.member]
            archives = list(dict.fromkeys(route.name for route in routes))
            also = f" (nor {', '.join(archives)})" if archives else ""
            names = ", ".join(item.name for item in missing)
            advice = f"; {self.optional} leaves out what you do not have" if self.optional else ""
            raise PrepareError(f"--from {self.folder}: no {names}{also}{advice}")
        for name, (path, route) in found.items():
            self.checks.require(path, route.name, route.digest)
            self.used[name] = path
        return found

    def obtain(self, wanted: Sequence[RequiredFile]) -> dict[str, Path]:
        """Find or download every wanted file, and unpack it; each archive is read once."""
        paths: dict[str, Path] = {}
        places = self.local(wanted) if self.folder is not None else {}
        for item in wanted:
            left = [other for other in wanted if other.name not in paths]
            if item.name in paths:
                continue
            if item.name in places:
                path, route = places[item.name]
                same = [other for other in left if places[other.name][0] == path]
                paths.update(self.unpack(same, (item, route), path))
            else:
                choices = [(item, route) for route in item.routes]
                paths.update(self.first(choices, partial(self.unpack, left)))
        return {item.name: paths[item.name] for item in wanted}

    def unpack(self, wanted: Sequence[RequiredFile], choice: Choice, path: Path) -> dict[str, Path]:
        """The chosen file; if it is in an archive, so are others of `wanted`."""
        item, chosen = choice
        if chosen.member is None:
            self.used[item.name] = path
            return {item.name: path}
        folder = self.work / "extracted" / path.name
        members = {
            other: route.member
            for other in wanted
            for route in other.routes
            if route.name == chosen.name and route.member is not None
        }
        targets = {other.name: folder / other.name for other in members}
        extract(path, {member: targets[other.name] for other, member in members.items()})
        for other in members:
            self.checks.require(targets[other.name], other.name, other.digest)
            self.used[other.name] = path
        return targets

    def first(self, choices: Sequence[Choice], use: Callable[[Choice, Path], T]) -> T:
        """What `use` makes of the first download that works. It raises PrepareError for one that
        cannot be used. After wrong bytes or a full disk, no file without a known checksum is used
        instead."""
        reasons: list[str] = []
        careful = False
        for choice in choices:
            item, route = choice
            name = route.name
            # A checksum of the download verifies the file, and so does one of the member.
            known = bool(self.checks.digest(name, route.digest).algorithm)
            if route.member is not None and self.checks.digest(item.name, item.digest).algorithm:
                known = True
            if careful and not known:
                reasons.append(f"{name} is not used instead, because it has no known checksum")
                continue
            if reasons:
                doubt = "" if known else " (it has no known checksum)"
                print(f"{reasons[-1]}; trying {name} instead{doubt}", file=sys.stderr)
            try:
                return self.downloader.get(route, partial(use, choice), known)
            except PrepareError as error:
                careful = careful or isinstance(error, Unfit)
                reasons.append(str(error))
        hint = "run again to resume, or pass --from DIR with the files in it"
        raise PrepareError(f"{'; '.join(reasons)} ({hint})")
