"""Registers everything with fairseq; what `--user-dir fairseq_dpq` comes down to."""

from __future__ import annotations

import contextlib
import logging
from typing import Iterator


def register() -> None:
    """Patch, register, hook in; safe to call again."""
    with _same_logging():
        from fairseq_dpq import compat
        from fairseq_dpq.glue import options

        compat.apply()
        import fairseq_dpq.models
        import fairseq_dpq.optim
        import fairseq_dpq.tasks  # noqa: F401

        options.add_to_all_tasks()
        compat.attach()


@contextlib.contextmanager
def _same_logging() -> Iterator[None]:
    """Leave the root logger as it was: a module that fairseq imports calls `basicConfig`, which
    would send the debug messages of a program that only wants the layer to its stderr."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
