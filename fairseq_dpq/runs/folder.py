"""A folder that one process at a time works in: its lock, and files that are written whole."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Iterator

from filelock import FileLock, Timeout

from fairseq_dpq.files.errors import CheckpointError

# fairseq lets every library log its details.
logging.getLogger("filelock").setLevel(logging.WARNING)


class RunsError(CheckpointError):
    """Bad input: one line that says what would be right."""


@contextlib.contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file; RunsError `busy` if another process holds it.

    The file is removed with the lock, and so are the empty folders that were made for it. A file
    that a killed process left behind does not block anybody.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()  # before it is free: whoever waits for this file tries again
    except Timeout:
        raise RunsError(busy) from None
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def working_in(out: Path) -> Iterator[None]:
    """Make and lock the folder --out; RunsError if it is none."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunsError(f"--out {out} is not a folder; give a folder") from error
    busy = f"another run is working in {out}; wait for it, or give another --out"
    with locked(out / ".lock", busy):
        yield


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a value, in one step."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, or None if there is none, or the file is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
