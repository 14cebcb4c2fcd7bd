"""Folders that are built once: in a temporary folder, stamped, then renamed.

The stamp has the inputs and options; if they are the same, there is nothing to do.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Mapping

from fairseq_dpq.datasets.errors import PrepareError

STAMP = "prepare.json"
Result = Dict[str, Any]


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """The stamp of a finished folder, or None if it is missing or the files have changed."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return stamp if sizes == stamp["files"] else None


def is_current(folder: Path, key: Mapping[str, Any]) -> Result | None:
    """The recorded result if `folder` was built with this key, else None."""
    stamp = read_stamp(folder)
    # Through JSON, so that tuples and lists compare equal.
    if stamp is None or stamp.get("key") != json.loads(json.dumps(key)):
        return None
    result: Result = stamp["result"]
    return result


def build_folder(
    folder: Path, key: Mapping[str, Any], build: Callable[[Path], Result], force: bool = False
) -> Result:
    """Return the result of `build(temporary folder)`, from the stamp if the key is unchanged."""
    if not force:
        result = is_current(folder, key)
        if result is not None:
            return result
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    for leftover in (partial, old):
        if leftover.is_symlink() or leftover.is_file():
            leftover.unlink()
        elif leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        result = build(partial)
        files = {
            path.relative_to(partial).as_posix(): path.stat().st_size
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        stamp = {"key": key, "result": result, "files": files}
        text = json.dumps(stamp, indent=1, ensure_ascii=False) + "\n"
        (partial / STAMP).write_text(text, encoding="utf-8")
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return result


def check_replaceable(folder: Path) -> None:
    """Only a folder that a prepare script created, or an empty one, may be replaced."""
    if folder.is_dir() and ((folder / STAMP).exists() or not any(folder.iterdir())):
        return
    if folder.exists():
        raise PrepareError(
            f"{folder} exists and was not created by this script (no {STAMP} in it); "
            "move it away or choose another --out"
        )
