"""Every patch of fairseq that this package makes: reason, versions, and what breaks without it.
`apply()` runs them all when the plugin is imported. A patch that is not needed does nothing.

Patches are needed by fairseq 0.12.2 (the last official release) with workers on CPU, and by every
version on Python 3.11, torch >= 2.6 or numpy >= 1.24. One fault is deliberately left alone:
`FairseqConfig` and `TransformerConfig` have shared objects (0.12.2) or classes (forks for Python
3.11) as defaults, so `TransformerConfig().encoder.embed_dim = 7` changes every later instance. No
fairseq command assigns to such a default. Build configs with `TransformerConfig.from_namespace`.
"""

from __future__ import annotations

from typing import Callable

from .attaching import attach
from .data import abort_at_exit, last_batch, numpy_names
from .distributed import cpu_workers, ddp_on_cpu
from .loading import checkpoint_loading, safe_globals
from .precision import bf16_without_tpu, fp16_on_cpu, fp16_overflow_on_cpu
from .starting import user_dir_again, warning_noise

__all__ = ["PATCHES", "apply", "attach", "safe_globals"]

PATCHES: tuple[Callable[[], bool], ...] = (
    checkpoint_loading,
    numpy_names,
    last_batch,
    abort_at_exit,
    cpu_workers,
    ddp_on_cpu,
    bf16_without_tpu,
    fp16_on_cpu,
    fp16_overflow_on_cpu,
    user_dir_again,
    warning_noise,
)


def apply() -> list[str]:
    """Run every patch that this installation needs; return the names of those that had an effect.

    Safe to call again: patches stay in place, and the list is then empty.
    """
    return [patch.__name__ for patch in PATCHES if patch()]
