"""Locks on --out and --work, and which folders --out may be.

A lock file is removed with the lock. One that a killed run left behind does not block others.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Iterator, Mapping

from fairseq_dpq.datasets.errors import PrepareError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def out_folder(out: Path) -> Iterator[None]:
    """Lock --out, which need not exist yet."""
    busy = f"another run is writing --out {out}; wait for it, or pass another --out and --work"
    with _locked(out.with_name(f".{out.name}.lock"), busy):
        yield


@contextlib.contextmanager
def work_folder(work: Path) -> Iterator[None]:
    """Lock the work folder; if it is empty at the end, it is removed."""
    busy = f"another run is using --work {work}; wait for it, or pass another --work and --out"
    with _locked(work / ".lock", busy, work / "downloads"):
        yield


@contextlib.contextmanager
def _locked(path: Path, busy: str, *more: Path) -> Iterator[None]:
    """Hold the lock file; at the end remove it, empty folders created for it, and empty `more`."""
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = -1
    try:
        handle = _lock(path, busy)
        yield
    finally:
        if handle >= 0:
            with contextlib.suppress(OSError):
                path.unlink()  # before it is free: see _lock
            os.close(handle)
        for folder in (*more, *missing):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _lock(path: Path, busy: str) -> int:
    """The open, locked file. If locking is not possible: a warning, and the file or -1."""
    handle = -1
    while fcntl is not None:
        try:
            # Opened to write, because NFS has no exclusive locks on files opened to read.
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise PrepareError(busy) from error
        except OSError as error:
            reason = error.strerror or error
            print(
                f"warning: {path}: cannot be locked ({reason}); do not start a second run",
                file=sys.stderr,
            )
            break
        # Another run may have ended and removed the file after it was opened here.
        if _is_file(path, handle):
            break
        os.close(handle)
        handle = -1
    return handle


def _is_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def find_out(out: Path, needed: Mapping[str, Path]) -> Path:
    """The folder of --out with links resolved, which must be replaceable as a whole.

    `needed` are folders that must not be inside it, by their names in a message.
    """
    found = _follow("--out", out)
    advice = f"choose a folder in it, e.g. --out {found / 'data'}"
    if _is_mount(found):
        raise PrepareError(f"--out {out} is a mount point and cannot be replaced; {advice}")
    for name, folder in needed.items():
        place = _follow(name, folder)
        if found in (place, *place.parents):
            raise PrepareError(
                f"--out {out} is replaced as a whole, but contains {name} {folder}; {advice}"
            )
    return found


def _follow(name: str, folder: Path) -> Path:
    try:
        found = folder.resolve()
        loop = found.is_symlink()  # a loop in Python 3.13
    except RuntimeError:  # a loop in older versions
        loop = True
    if loop:
        raise PrepareError(f"{name} {folder} is a symbolic link to itself; give a folder")
    return found


def _is_mount(folder: Path) -> bool:
    if os.path.ismount(folder):
        return True
    # A bind mount of a folder on the same disk appears in this list only.
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    name = os.fsencode(folder)
    for special in b"\\ \t\n":  # as the kernel writes them
        name = name.replace(bytes([special]), b"\\%03o" % special)
    return any(line.split(b" ")[4] == name for line in mounts)
