"""Registers everything with fairseq; what `--user-dir fairseq_dpq` comes down to."""

from __future__ import annotations

from fairseq_dpq import compat
from fairseq_dpq.glue import options


def register() -> None:
    """Patch, register, hook in; safe to call again."""
    compat.apply()
    import fairseq_dpq.models
    import fairseq_dpq.optim
    import fairseq_dpq.tasks  # noqa: F401

    options.add_to_all_tasks()
    compat.attach()
