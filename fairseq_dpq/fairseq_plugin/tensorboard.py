"""Figures of each table in TensorBoard, in the folder `dpq` beside those of fairseq."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor


def writer(cfg: Any) -> Any:
    """A writer among fairseq's own, which it closes at exit; None without --tensorboard-logdir,
    without tensorboard, and on all workers but the first."""
    from fairseq.distributed import utils as distributed_utils
    from fairseq.logging import progress_bar

    folder = cfg.common.tensorboard_logdir
    master = distributed_utils.is_master(cfg.distributed_training)
    if not folder or not master or progress_bar.SummaryWriter is None:
        return None
    place = os.path.join(folder, "dpq")
    writers = progress_bar._tensorboard_writers
    if place not in writers:
        writers[place] = progress_bar.SummaryWriter(place)
    return writers[place]


def write(writer: Any, table: str, row: dict[str, float], counts: Tensor, step: int) -> None:
    """The figures of one table, and a histogram of how many symbols each code has (D, K)."""
    for name, value in row.items():
        writer.add_scalar(f"{table}/{name}", value, step)
    writer.add_histogram(f"{table}/symbols_per_code", counts.flatten(), step)
    writer.flush()
