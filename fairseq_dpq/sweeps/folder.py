"""A sweep's folder: its lock, and the note of what it runs."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Iterator

from fairseq_dpq.sweeps.commands import Base
from fairseq_dpq.sweeps.errors import SweepError
from fairseq_dpq.sweeps.grid import Grid
from fairseq_dpq.sweeps.results import write_whole

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

NOTE = "sweep.json"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[int]:
    """Hold the folder. The guards of runs inherit the lock: after a sweep was killed, the next one
    can start only when the last of its runs is gone."""
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SweepError(
                    f"another sweep is running in {out}; wait for it, or give another --out"
                ) from None
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
