"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, Callable

import torch

from fairseq_dpq.checkpoints.errors import CheckpointError


def check_target(target: Path, inputs: list[Path], force: bool) -> None:
    """Refuse a target that would destroy something, before any work is done."""
    for path in inputs:
        same = target.exists() and path.exists() and os.path.samefile(target, path)
        if same or os.path.realpath(target) == os.path.realpath(path):
            raise CheckpointError(f"{target} is the input itself; give another name for the output")
    if target.is_dir():
        raise CheckpointError(f"{target} is a directory; give the name of a file in it")
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists; use --force to replace it")
    if not target.parent.is_dir():
        raise CheckpointError(f"the folder of {target} does not exist")


def write_whole(
    target: Path,
    write: Callable[[BinaryIO], None],
    check: Callable[[Path], None] | None = None,
    force: bool = False,
) -> None:
    """Write a temporary file beside `target`, fsync, `check` it, and only then give it its name."""
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _explain(target, error) from error
        if check is not None:
            check(part)
        _give_name(part, target, force)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    _sync_folder(target.parent)


def save_state(state: Any, file: BinaryIO) -> None:
    """torch.save, with the operating system's own error where writing fails."""
    guard: Any = _Guard(file)
    try:
        torch.save(state, guard)
    except BaseException:
        # torch's writer covers the first error up with complaints about its own position
        if guard.error is not None:
            raise guard.error from None
        raise


class _Guard:
    """A file that remembers why it could not be written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _give_name(part: Path, target: Path, force: bool) -> None:
    if force:
        os.replace(part, target)
        return
    try:
        os.link(part, target)  # unlike a rename, never replaces what came meanwhile
    except FileExistsError:
        raise CheckpointError(f"{target} exists; use --force to replace it") from None
    except OSError:  # a file system without links
        if target.exists():
            raise CheckpointError(f"{target} exists; use --force to replace it") from None
        os.replace(part, target)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems do not sync folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _explain(target: Path, error: OSError) -> CheckpointError:
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(target.parent).free:,} bytes are free there)"
    return CheckpointError(f"cannot write {target}: {error.strerror}{free}; nothing was left there")
