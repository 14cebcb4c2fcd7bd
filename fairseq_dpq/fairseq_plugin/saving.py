"""How fairseq writes checkpoints: whole, or one line of error that leaves the older ones."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any, Callable, Iterator

from fairseq_dpq.fairseq_plugin.patching import around
from fairseq_dpq.files.errors import DPQConfigError
from fairseq_dpq.files.writer import save_state

logger = logging.getLogger("fairseq_dpq")


def checkpoint_files() -> bool:
    """fairseq copies a checkpoint onto checkpoint_last.pt and checkpoint_best.pt in place, and
    after a failed save it appends the next try to what is in the file, all versions.

    Without it, a run that is killed meanwhile or a full disk leaves a part of a file under the name
    that the next start loads, and the one that was there is lost.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    def copy(old: Callable, src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not overwrite or not PathManager.supports_rename(dst_path):
            return old(src_path, dst_path, overwrite)
        with _writing(dst_path) as part:
            if not old(src_path, part, overwrite=True):
                raise OSError("the log says why")
            os.replace(part, dst_path)
        return True

    def save(old: Callable, obj: Any, filename: str, async_write: bool = False) -> None:
        for pause in (None,) if async_write else (2.5, 2.5, None):  # as long as fairseq tries
            try:
                with _writing(filename):
                    old(obj, filename, async_write)
                return
            except DPQConfigError as error:
                if pause is None:
                    raise
                logger.warning(f"{error}; trying again in {pause} s")
                time.sleep(pause)

    around(checkpoint_utils, "_torch_persistent_save", lambda old, obj, f: save_state(obj, f))
    around(checkpoint_utils, "torch_persistent_save", save)
    return around(PathManager, "copy", copy)


@contextlib.contextmanager
def _writing(path: str) -> Iterator[str]:
    part = f"{path}.tmp"  # as fairseq names a file that it saves
    try:
        yield part
    except OSError as error:
        why = error.strerror or error
        raise DPQConfigError(f"cannot write {path}: {why}; older checkpoints stay") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(part)
