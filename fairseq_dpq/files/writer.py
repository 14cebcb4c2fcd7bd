"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, Callable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.memory import memory_of
from fairseq_dpq.files.reader import SYMBOLS, metadata, symbols_tensor, table_config
from fairseq_dpq.forms.base import Form

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


DTYPES = {"U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}
DTYPES.update({"F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool})
DTYPES.update({"F64": torch.float64, "I64": torch.int64, "I16": torch.int16, "I8": torch.int8})


def check_target(target: Path, inputs: list[Path], force: bool) -> None:
    """Refuse a target that would destroy something, before any work is done."""
    for path in inputs:
        same = target.exists() and path.exists() and os.path.samefile(target, path)
        if same or os.path.realpath(target) == os.path.realpath(path):
            raise CheckpointError(f"{target} is the input itself; give another name for the output")
    if target.is_dir():
        raise CheckpointError(f"{target} is a directory; give the name of a file in it")
    if target.exists() and not force:
        raise _exists(target)
    if not target.parent.is_dir():
        raise CheckpointError(f"the folder of {target} does not exist")


def write_whole(
    target: Path,
    write: Callable[[BinaryIO], Any],
    check: Callable[[Path], Any] | None = None,
    force: bool = False,
) -> Any:
    """Write a temporary file beside `target`, fsync, `check` it, and only then give it its name;
    returns what `check` did.

    The temporary file is locked as long as its process lives: the next run can tell what a killed
    one has left from what another is writing.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with _create(part, target) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                checked = None if check is None else check(part)
                _give_name(part, target, force)
        except OSError as error:
            raise _explain(target, error) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    _sync_folder(target.parent)
    return checked


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], meta: dict[str, str]) -> None:
    """Write a safetensors file tensor by tensor: a whole model is never in memory twice.

    The library's own `save_file` makes a file that only its owner can read, under another name.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    # Wide numbers first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": meta}
    start = 0
    for key in ordered:
        tensor = tensors[key]
        end = start + tensor.numel() * tensor.element_size()
        entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
        header[key] = {**entry, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for key in ordered:
        file.write(memory_of(tensors[key]))


def write_form(
    target: Path, form: Form, name: str, symbols: list[str] | None = None, force: bool = False
) -> None:
    """Write one table as a safetensors file that `read_form` opens."""
    tensors = form.export_tensors()
    if symbols is not None:
        tensors[SYMBOLS] = symbols_tensor(symbols)
    meta = metadata(name, table_config(form), tensors)
    write_whole(target, lambda file: write_tensors(file, tensors, meta), force=force)


def _create(part: Path, target: Path) -> BinaryIO:
    """Open and lock a temporary file, once those of killed runs on the same target are gone."""
    if fcntl is None:
        return part.open("xb")
    pattern = re.compile(re.escape(f".{target.name}.") + r"\d+\.[0-9a-f]{8}\.tmp")
    at_once = fcntl.LOCK_EX | fcntl.LOCK_NB
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)  # one process at a time looks and makes its own
        for old in filter(pattern.fullmatch, os.listdir(target.parent)):
            with contextlib.suppress(FileNotFoundError), (target.parent / old).open("rb+") as left:
                try:
                    fcntl.flock(left, at_once)
                except BlockingIOError:
                    raise CheckpointError(f"another run is writing {target}") from None
                (target.parent / old).unlink()
        file = part.open("xb")
        with contextlib.suppress(OSError):
            fcntl.flock(file, at_once)
        return file
    finally:
        os.close(folder)


def save_state(state: Any, file: BinaryIO) -> None:
    """torch.save, with the operating system's own error where writing fails."""
    errors: list[OSError] = []

    def write(data: Any) -> int:
        try:
            return file.write(data)
        except OSError as error:
            errors.append(error)
            raise

    guard: Any = SimpleNamespace(write=write, flush=file.flush)
    try:
        torch.save(state, guard)
    except BaseException:
        # torch's writer covers the first error up with complaints about its own position
        if errors:
            raise errors[0] from None
        raise


def write_state(target: Path, state: Any, check: Callable[[Path], Any], force: bool = False) -> Any:
    """Write a checkpoint, as `write_whole` does."""
    return write_whole(target, lambda file: save_state(state, file), check, force)


def _give_name(part: Path, target: Path, force: bool) -> None:
    if not force:
        try:
            os.link(part, target)  # unlike a rename, never replaces what came meanwhile
            return
        except OSError:  # it is there, or the file system has no links
            if os.path.lexists(target):
                raise _exists(target) from None
    os.replace(part, target)


def _exists(target: Path) -> CheckpointError:
    return CheckpointError(f"{target} exists; use --force to replace it")


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
