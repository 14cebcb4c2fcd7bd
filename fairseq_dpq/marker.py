"""What a checkpoint with DPQ tables tells a process that has not imported this package.

torch's safe loader stops at the first class that it does not know, and its error names that class.
A process that was started without `--user-dir fairseq_dpq` stops at this one. A process that
unpickles everything, as torch did before 2.6, imports this module by it: that registers the plugin.
"""

from __future__ import annotations

from typing import Any

import torch

KEY = "fairseq_dpq"


class DPQ_checkpoint__add__user_dir_fairseq_dpq:
    """Stands in a checkpoint under `KEY`. It holds nothing."""


def allow() -> None:
    """Let torch's safe loader read marked checkpoints in this process."""
    register = getattr(torch.serialization, "add_safe_globals", None)
    if register is not None:  # torch < 2.4 has no such list
        register([DPQ_checkpoint__add__user_dir_fairseq_dpq])


def marked(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint with the marker in front of all that torch may refuse."""
    return {KEY: DPQ_checkpoint__add__user_dir_fairseq_dpq, **state}
