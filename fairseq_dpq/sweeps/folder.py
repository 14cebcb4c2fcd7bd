"""A sweep's folder: its lock, and the note of what it runs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Iterator

from fairseq_dpq.sweeps.commands import Base
from fairseq_dpq.sweeps.errors import SweepError
from fairseq_dpq.sweeps.grid import Grid
from fairseq_dpq.sweeps.guard import GRACE
from fairseq_dpq.sweeps.results import write_whole

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

NOTE = "sweep.json"
_WAIT = 2 * GRACE + 10.0  # seconds for the guards of a killed sweep to end


def _take(handle: int, out: Path) -> None:
    """Lock the open file. A sweep that is gone may have guards that are still ending their runs:
    they are waited for. One that lives is not."""
    until = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if _lives(os.pread(handle, 20, 0)) or time.monotonic() > until:
                raise SweepError(
                    f"another sweep is running in {out}; wait for it, or give another --out"
                ) from None
        time.sleep(0.1)


def _lives(written: bytes) -> bool:
    """Whether the process whose number a lock file has is there; True if nothing says that not."""
    try:
        os.kill(int(written), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OSError):
        pass
    return True


@contextlib.contextmanager
def locked(out: Path) -> Iterator[int]:
    """Hold the folder. The guards of runs inherit the lock: after a sweep was killed, the next one
    can start only when the last of its runs is gone."""
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            _take(handle, out)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield handle
    finally:
        os.close(handle)


def read_note(out: Path) -> tuple[Base, Grid] | None:
    """What a folder's sweep runs; None for a folder without one."""
    path = out / NOTE
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Base.from_dict(raw["base"]), Grid.from_dict(raw["grid"])
    except (ValueError, KeyError, TypeError) as error:
        raise SweepError(f"{path} is damaged: {error}") from error


def write_note(out: Path, base: Base, grid: Grid) -> None:
    write_whole(
        out / NOTE, json.dumps({"base": base.to_dict(), "grid": grid.to_dict()}, indent=1) + "\n"
    )
