"""Extract members of tar, zip and gzip files, completely or not at all.

An archive is refused if any member of it would leave the target folder: by tarfile's own data
filter, and by the same rules for zip files.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tarfile
import tempfile
import zipfile
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any, Iterator, Mapping, Tuple

from experiments.datasets import PrepareError

_Member = Tuple[str, Any]  # its name, and what opens it


def extract(archive: Path, members: Mapping[str, Path]) -> None:
    """Write each wanted member (its path in the archive, which may contain `*`) to its target file.

    A plain .gz has a single member without a name, which is written to the only target.
    """
    staged = {member: path.with_name(path.name + ".tmp") for member, path in members.items()}
    for target in members.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as files:
            seen = _copy(_members(archive, files), staged)
        missing = [member for member in members if member not in seen]
        if missing:
            raise PrepareError(f"has no member {', '.join(missing)}")
        for member, target in members.items():
            os.replace(staged[member], target)
    except PrepareError as error:
        raise PrepareError(f"archive {archive}: {error}") from error
    except tarfile.FilterError as error:
        raise PrepareError(f"archive {archive}: refused: {error}") from error
    except Exception as error:
        # On bad headers tarfile, zipfile and the decompressors raise almost anything: ValueError,
        # IndexError, OSError without a number, ... A full disk is not the fault of the archive.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        text = str(error) or type(error).__name__
        raise PrepareError(f"archive {archive}: cut short or damaged ({text})") from error
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)


def _members(archive: Path, files: ExitStack) -> Iterator[_Member]:
    """Names of the files in an archive, each checked, and how to open them."""
    with open(archive, "rb") as stream:
        magic = stream.read(4)
    packed = magic[:2] == b"\x1f\x8b"
    if magic in (b"PK\x03\x04", b"PK\x05\x06"):
        yield from _zip_members(files.enter_context(zipfile.ZipFile(archive)))
    elif (archive.name.endswith((".tgz", ".tar.gz")) and packed) or archive.suffix == ".tar":
        opener: Any = gzip.open if packed else open
        yield from _tar_members(files.enter_context(opener(archive, "rb")), files)
    elif packed:
        yield "*", partial(gzip.open, archive, "rb")
    else:
        raise PrepareError(f"is not a tar, zip or gzip file: it begins with {magic!r}")


def _tar_members(stream: IO[bytes], files: ExitStack) -> Iterator[_Member]:
    # The filter resolves links; in a folder without any it judges the archive alone.
    empty = files.enter_context(tempfile.TemporaryDirectory())
    # "r|" reads the archive once from front to back: it may be a gigabyte.
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for info in tar:
            checked = tarfile.data_filter(info.replace(name=_plain(info.name), deep=False), empty)
            if info.issparse():
                # A few bytes of header can expand to terabytes of zeros.
                raise PrepareError(f"member {info.name!r} is a sparse file")
            if info.isfile():
                yield checked.name, lambda info=info: tar.extractfile(info)
    while stream.read(1 << 20):  # to the end: gzip checks its length and CRC there
        pass


def _zip_members(bundle: zipfile.ZipFile) -> Iterator[_Member]:
    names = [(_plain(info.filename), info) for info in bundle.infolist()]
    for name, info in names:
        if not info.is_dir():
            yield name, lambda info=info: bundle.open(info)


def _plain(name: str) -> str:
    """The member's path without `./`; PrepareError if it leaves the target folder."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    drive = bool(parts) and len(parts[0]) >= 2 and parts[0][1] == ":"
    if name.startswith(("/", "\\")) or drive or ".." in parts or "\0" in name:
        raise PrepareError(f"member {name!r} points outside the target folder")
    return "/".join(parts)


def _copy(members: Iterator[_Member], staged: Mapping[str, Path]) -> set[str]:
    """Write the wanted members; their names."""
    seen: set[str] = set()
    for name, opener in members:
        for wanted, path in staged.items():
            if name not in (wanted, "*") and not ("*" in wanted and fnmatchcase(name, wanted)):
                continue
            if wanted in seen:
                raise PrepareError(f"member {wanted} occurs twice")
            with opener() as source, open(path, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            seen.add(wanted)
    return seen
