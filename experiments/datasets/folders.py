"""Folders of prepared data: where --out may be, and building it once.

A folder is built under a temporary name, stamped with its inputs and options, then renamed. If the
stamp has the same inputs and options, there is nothing to do.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Mapping

from experiments.datasets import PrepareError
from fairseq_dpq.runs.folder import read_json, write_json

STAMP = "prepare.json"
Result = Dict[str, Any]


def is_current(folder: Path, key: Mapping[str, Any]) -> Result | None:
    """The recorded result if `folder` was built with this key and is complete, else None."""
    stamp = read_json(folder / STAMP)
    try:
        # The key through JSON, so that tuples and lists compare equal.
        if stamp is None or stamp["key"] != json.loads(json.dumps(key)):
            return None
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
        result: Result = dict(stamp["result"])
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return result if sizes == stamp["files"] else None


def build_folder(
    folder: Path, key: Mapping[str, Any], build: Callable[[Path], Result], force: bool = False
) -> tuple[Result, bool]:
    """The result of `build(temporary folder)`, or that of the stamp if the key is unchanged, and
    whether it was built. The temporary folder has a subfolder `scratch`, which is removed."""
    result = None if force else is_current(folder, key)
    if result is not None:
        return result, False
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    for leftover in (partial, old):
        if leftover.is_symlink() or leftover.is_file():
            leftover.unlink()
        elif leftover.exists():
            shutil.rmtree(leftover)
    (partial / "scratch").mkdir(parents=True)
    try:
        result = build(partial)
        shutil.rmtree(partial / "scratch")
        files = {
            path.relative_to(partial).as_posix(): path.stat().st_size
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        write_json(partial / STAMP, {"key": key, "result": result, "files": files})
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return result, True


def check_replaceable(folder: Path) -> None:
    """Only a folder that a prepare script created, or an empty one, may be replaced."""
    if folder.is_dir() and ((folder / STAMP).exists() or not any(folder.iterdir())):
        return
    if folder.exists():
        raise PrepareError(
            f"{folder} exists and was not created by this script (no {STAMP} in it); "
            "move it away or choose another --out"
        )


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
