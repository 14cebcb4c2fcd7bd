"""Extract members of tar, zip and gzip files, completely or not at all.

An archive is refused if any member points outside the target folder.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Iterator, Mapping

from fairseq_dpq.datasets.errors import PrepareError


@contextmanager
def _reading() -> Iterator[None]:
    """Turn any error of reading an archive into a PrepareError. On bad headers tarfile, zipfile and
    the decompressors raise almost anything: ValueError, IndexError, UnicodeDecodeError, ..."""
    try:
        yield
    except PrepareError:
        raise
    except Exception as error:
        text = str(error) or type(error).__name__
        raise PrepareError(f"cut short or damaged ({text})") from error


def safe_name(name: str) -> str:
    """The member's path without `./`; PrepareError if it leaves the target folder."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    drive = bool(parts) and len(parts[0]) >= 2 and parts[0][1] == ":"
    if name.startswith(("/", "\\")) or drive or ".." in parts or "\0" in name:
        raise PrepareError(f"member {name!r} points outside the target folder")
    return "/".join(parts)


def extract(archive: Path, members: Mapping[str, Path]) -> None:
    """Write each wanted member (its path in the archive, which may contain `*`) to its target file.

    A plain .gz has a single member without a name, which is written to the only target.
    """
    staged: dict[str, Path] = {
        member: target.with_name(target.name + ".tmp") for member, target in members.items()
    }
    for target in members.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        seen = _copy_members(archive, staged)
        missing = [member for member in members if member not in seen]
        if missing:
            raise PrepareError(f"has no member {', '.join(missing)}")
        for member, target in members.items():
            os.replace(staged[member], target)
    except PrepareError as error:
        raise PrepareError(f"archive {archive}: {error}") from error
    finally:
        for path in staged.values():
            if path.exists():
                path.unlink()


def _copy_members(archive: Path, staged: Mapping[str, Path]) -> list[str]:
    with open(archive, "rb") as stream:
        magic = stream.read(4)
    if magic == b"PK\x03\x04" or magic == b"PK\x05\x06":
        return _copy(_zip_members(archive), staged)
    is_tar = archive.name.endswith((".tgz", ".tar.gz", ".tar"))
    if magic[:2] == b"\x1f\x8b" and not is_tar:
        ((member, path),) = staged.items()
        with gzip.open(archive, "rb") as source:
            _write(source, path)
        return [member]
    if magic[:2] == b"\x1f\x8b" or archive.name.endswith(".tar"):
        return _copy(_tar_members(archive), staged)
    raise PrepareError(f"is not a tar, zip or gzip file: it begins with {magic!r}")


def _copy(members: Iterator[tuple[str, Any]], staged: Mapping[str, Path]) -> list[str]:
    seen: list[str] = []
    while True:
        with _reading():
            found = next(members, None)
        if found is None:
            return seen
        name, opener = found
        for wanted, path in staged.items():
            if name != wanted and not ("*" in wanted and fnmatchcase(name, wanted)):
                continue
            if wanted in seen:
                raise PrepareError(f"member {wanted} occurs twice")
            with _reading():
                source = opener()
            with source:
                _write(source, path)
            seen.append(wanted)


def _write(source: IO[bytes] | gzip.GzipFile, path: Path) -> None:
    """Copy a member. Only read errors are blamed on the archive, not a full disk."""
    with open(path, "wb") as out:
        while True:
            with _reading():
                block = source.read(1 << 20)
            if not block:
                return
            out.write(block)


def _tar_members(archive: Path) -> Iterator[tuple[str, Any]]:
    opener: Any = open if archive.name.endswith(".tar") else gzip.open
    # "r|" reads the archive once from front to back: it may be a gigabyte.
    with opener(archive, "rb") as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for info in tar:
                name = safe_name(info.name)
                if info.issym() or info.islnk():
                    _check_link(name, info)
                elif info.issparse():
                    # A few bytes of header can expand to terabytes of zeros.
                    raise PrepareError(f"member {name!r} is a sparse file")
                elif info.isfile():
                    yield name, lambda info=info: tar.extractfile(info)
                elif not info.isdir():
                    raise PrepareError(f"member {name!r} is a device, not a file")
        while stream.read(
            1 << 20
        ):  # to the end, so that gzip checks its length and CRC; tarfile does not
            pass


def _check_link(name: str, info: tarfile.TarInfo) -> None:
    base = os.path.dirname(name) if info.issym() else ""
    joined = os.path.normpath(os.path.join(base, info.linkname))
    if os.path.isabs(info.linkname) or joined.split(os.sep)[0] == "..":
        raise PrepareError(f"link {name!r} points outside the target folder")


def _zip_members(archive: Path) -> Iterator[tuple[str, Any]]:
    with zipfile.ZipFile(archive) as bundle:
        names = [(safe_name(info.filename), info) for info in bundle.infolist()]
        for name, info in names:
            if not info.is_dir():
                yield name, lambda info=info: bundle.open(info)
