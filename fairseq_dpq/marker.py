"""What a checkpoint with DPQ tables tells a process that has not imported this package.

torch's safe loader stops at the first class that it does not know, and its error names that class.
A process that was started without `--user-dir fairseq_dpq` stops at this one. A process that
unpickles everything, as torch did before 2.6, imports this module by it: that registers the plugin.
"""

from __future__ import annotations

import collections
import typing
from argparse import Namespace
from typing import Any

KEY = "fairseq_dpq"


class DPQ_checkpoint__add__user_dir_fairseq_dpq:
    """Stands in a checkpoint under `KEY`. It holds nothing."""


def marked(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint with the marker in front of all that torch may refuse."""
    return {KEY: DPQ_checkpoint__add__user_dir_fairseq_dpq, **state}


def plain_globals() -> list[Any]:
    """What a pickle may name without fairseq: containers, numbers, numpy's scalars and arrays.

    Entries are classes, or pairs (object, name in the file) where old files use an older name. None
    can run code from the file.
    """
    import numpy as np

    items: list[Any] = [Namespace, collections.defaultdict, dict, list, tuple, set]
    items += [int, float, str, bool, (typing.Any, "typing.Any")]
    # Scores and meters are sometimes numpy scalars or small arrays. numpy 1 and 2 use different
    # names for the functions that rebuild them, and a file from either must load in both.
    rebuild = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        items += [(rebuild, f"{core}._reconstruct"), (scalar, f"{core}.scalar")]
    items += [np.ndarray, np.dtype]
    # Since numpy 1.25 each dtype has its own class; before, all are numpy.dtype.
    dtypes = {type(np.dtype(t)) for t in [*"?bhilqBHILQefd", "U1", "S1"]}
    items += sorted(dtypes - {np.dtype}, key=lambda c: c.__name__)
    return [*items, DPQ_checkpoint__add__user_dir_fairseq_dpq]
