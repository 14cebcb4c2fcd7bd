"""Registers everything with fairseq: what `--user-dir fairseq_dpq` does."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any, Iterator

from fairseq_dpq import marker
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.files.errors import printable


def register() -> None:
    """Apply the patches, register options and classes, attach the hooks; safe to call again."""
    with _same_logging():
        from fairseq_dpq.fairseq_plugin import compat, options

        compat.apply()
        marker.allow()
        import fairseq_dpq.fairseq_plugin.models
        import fairseq_dpq.fairseq_plugin.optim
        import fairseq_dpq.fairseq_plugin.tasks  # noqa: F401

        options.add_to_all_tasks()
        compat.attach()
    _say_errors_plainly()


def _say_errors_plainly() -> None:
    """Report an invalid option in one line instead of fairseq's traceback."""
    old = sys.excepthook
    if getattr(old, "_fairseq_dpq", False):
        return

    def hook(kind: Any, error: Any, traceback: Any) -> None:
        if issubclass(kind, DPQConfigError) and not os.environ.get("FAIRSEQ_DPQ_DEBUG"):
            print(f"fairseq_dpq: error: {printable(error)}", file=sys.stderr)
        else:
            old(kind, error, traceback)

    hook._fairseq_dpq = True  # type: ignore[attr-defined]
    sys.excepthook = hook


@contextlib.contextmanager
def _same_logging() -> Iterator[None]:
    """Keep the root logger unchanged: a module that fairseq imports calls `basicConfig`, which
    would print the debug messages of a program to its stderr."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
