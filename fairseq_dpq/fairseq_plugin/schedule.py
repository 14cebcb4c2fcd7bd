"""How long the training will be, which the warm-up of a table follows.

--max-update is known when the model is built. --max-epoch is a number of updates only once the data
is loaded, so that tables get their schedule then.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from fairseq_dpq.fairseq_plugin.configs import get_option, read_record, run_option, write_record
from fairseq_dpq.fairseq_plugin.layers import FairseqDPQEmbedding
from fairseq_dpq.fairseq_plugin.training import named_tables
from fairseq_dpq.methods import MethodOptions

logger = logging.getLogger("fairseq_dpq")

_UNKNOWN = 8  # updates, until the data is loaded: enough for a warm-up to exist at all


def first_guess(model_cfg: Any) -> int:
    """The number of updates as far as it is known when the model is built; 0 if it has no end."""
    updates = int(run_option(model_cfg, "optimization", "max_update") or 0)
    if updates:
        return updates
    return _UNKNOWN if run_option(model_cfg, "optimization", "max_epoch") else 0


def is_open(given: MethodOptions, config: MethodOptions) -> bool:
    """Whether the length of the training decides about an option that a checkpoint keeps."""
    kept = [f.name for f in fields(config) if f.metadata["keeps"]]
    return any(getattr(given, n) is None and getattr(config, n) is not None for n in kept)


def settle(trainer: Any, batches: Any) -> None:
    """Set the schedules that were left open, now that the batches of an epoch are known."""
    cfg, model = trainer.cfg, trainer.get_model()
    tables = [
        (path, table, table.open_schedule)
        for path, table in named_tables(model)
        if isinstance(table, FairseqDPQEmbedding) and table.open_schedule is not None
    ]
    if not tables:
        return
    length = _updates(cfg.optimization, len(batches))
    record = read_record(cfg.model)
    for path, table, (wanted, use) in tables:
        table.open_schedule = None
        now, plain, _ = table.schedule_counts()
        if not length or not plain:
            continue
        started = now > 0
        if started and now != plain:
            continue  # codes that a DPQ checkpoint brought
        config = wanted.resolved(use._replace(max_update=max(length, _UNKNOWN)))
        table.set_schedule(config, started)
        if record is not None and path in record.tables:
            record.tables[path].options = config.keywords()
        _, plain, last = table.schedule_counts()
        ramp = f"the full table gives way to quantised rows until update {last - plain}"
        logger.info(f"{path}: {ramp if started else config.method.describe_start(config)}")
    if record is not None:
        write_record(cfg.model, record)


def _updates(optimization: Any, batches: int) -> int:
    """The number of updates of the whole training, whichever limit comes first."""
    most = int(get_option(optimization, "max_update") or 0)
    epochs = int(get_option(optimization, "max_epoch") or 0)
    if not epochs:
        return most
    each = list(get_option(optimization, "update_freq") or [1])
    total = sum(-(-batches // each[min(epoch, len(each) - 1)]) for epoch in range(epochs))
    return min(total, most) if most else total
