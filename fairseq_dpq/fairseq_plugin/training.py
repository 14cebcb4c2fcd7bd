"""DPQ during training: how long the warm-up is, the regulariser in the loss, statistics after each
update, the log.

Every criterion is called with the model, so the regularisers of its tables are collected there.
They are added once, scaled by the criterion's sample size.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_dpq.config import DPQConfigError, format_flag
from fairseq_dpq.fairseq_plugin.configs import get_option, read_record, run_option, write_record
from fairseq_dpq.fairseq_plugin.layers import FairseqDPQEmbedding
from fairseq_dpq.fairseq_plugin.options import read_options
from fairseq_dpq.layer import DPQEmbedding, dpq_modules
from fairseq_dpq.methods import MethodOptions
from fairseq_dpq.training.codes import code_counts, usage_of_counts

logger = logging.getLogger("fairseq_dpq")

REGULARIZER_KEY = "dpq_regularizer"
WEIGHT_KEY = "dpq_regularizer_weight"
_COLLAPSED = 0.25  # of the codes in use, or of the entropy that is possible
_UNKNOWN = 8  # updates, until the data is loaded: enough for a warm-up to exist at all


def named_tables(model: nn.Module) -> list[tuple[str, DPQEmbedding]]:
    """The DPQ tables of a model, DDP-wrapped or not, each once, by path."""
    return [
        (name.replace("module.", "", 1) if name.startswith("module.") else name, m)
        for name, m in model.named_modules()
        if isinstance(m, DPQEmbedding)
    ]


# The length of the training -----------------------------------------------------------------------
# --max-update is known when the model is built. --max-epoch is a number of updates only once the
# data is loaded, so that tables get their schedule then.


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


def settle_schedules(trainer: Any, batches: Any) -> None:
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


# Each update --------------------------------------------------------------------------------------


def forget_batch(model: Any) -> None:
    """Drop regularisers that are not those of the next batch."""
    for table in dpq_modules(model) if isinstance(model, nn.Module) else ():
        table.regularizers.waiting.clear()


def add_regularizer(model: Any, result: Any) -> Any:
    """Add the tables' regularisers to a criterion's (loss, sample_size, logging_output)."""
    if not isinstance(model, nn.Module):
        return result
    found = (table.regularizers.pop() for table in dpq_modules(model))
    popped = [pair for pair in found if pair is not None]
    if not popped:
        return result
    loss, sample_size, logging_output = result
    terms, errors = zip(*popped)
    if model.training:
        loss = loss + torch.stack(terms).sum() * sample_size
    logging_output[REGULARIZER_KEY] = torch.stack(errors).sum() * sample_size
    logging_output[WEIGHT_KEY] = sample_size
    return loss, sample_size, logging_output


def after_update(model: nn.Module, optimizer: Any) -> None:
    """Update the tables' statistics after one update, identically on all workers."""
    for name, table in named_tables(model):
        if table.regularizers.waiting:
            raise DPQConfigError(
                f"the VQ regulariser of {name} did not reach the loss: the task calls "
                "criterion.forward(model, sample) or uses a model other than the one it passes to "
                "the criterion. It must call criterion(model, sample)"
            )
        was_plain = table.is_plain
        if table.step():
            _copy_to_optimizer(table, optimizer)
        if was_plain and not table.is_plain:
            forget_best()


def forget_best() -> None:
    """The scores of a plain table are those of another model, and its checkpoints have no codes:
    they must not stay the best ones, nor end the training by --patience."""
    from fairseq import checkpoint_utils

    if hasattr(checkpoint_utils.save_checkpoint, "best"):
        del checkpoint_utils.save_checkpoint.best
    for module in ("fairseq_cli.train", "__main__"):
        stop: Any = getattr(sys.modules.get(module), "should_stop_early", None)
        if getattr(stop, "best", None) is not None:
            stop.best = None


def _copy_to_optimizer(table: DPQEmbedding, optimizer: Any) -> None:
    """Copy re-initialised parameters to the float32 copies of an fp16 optimiser."""
    copies = getattr(optimizer, "fp32_params", None)
    own = getattr(optimizer, "fp16_params", None)
    if copies is None or own is None:
        return
    mine = {id(p) for p in table.parameters()}
    if isinstance(copies, dict):  # one flat tensor for each device
        offset = dict.fromkeys(copies, 0)
        for p in own:
            device = p.device.index if len(copies) > 1 else next(iter(copies))
            start = offset[device]
            if id(p) in mine:
                copies[device].data[start : start + p.numel()] = p.data.float().view(-1)
            offset[device] = start + p.numel()
    else:
        for p, copy in zip(own, copies):
            if id(p) in mine:
                copy.data.copy_(p.data)


def log_regularizer(logging_outputs: Any) -> None:
    """Log the regulariser in fairseq's metrics, next to the loss."""
    from fairseq.logging import metrics

    with_it = [o for o in logging_outputs or [] if REGULARIZER_KEY in o]
    weight = sum(_number(o[WEIGHT_KEY]) for o in with_it)
    if with_it and weight:
        value = sum(_number(o[REGULARIZER_KEY]) for o in with_it) / weight
        metrics.log_scalar(REGULARIZER_KEY, value, weight, priority=150, round=5)


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


# The log ------------------------------------------------------------------------------------------


def watch_of(trainer: Any) -> CodeWatch:
    """What follows the codes of a trainer's model."""
    if not hasattr(trainer, "_dpq_watch"):
        trainer._dpq_watch = CodeWatch(read_options(trainer.cfg.model).log_interval)
    return trainer._dpq_watch


class CodeWatch:
    """Follows the codes of a model's tables through a training, every so many updates."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.codes: dict[str, Tensor] = {}
        self.updates: int | None = None
        self.stats: dict[str, float] = {}

    @torch.no_grad()
    def look(self, trainer: Any) -> None:
        """Log code use, entropy and change of each table, once for each number of updates."""
        updates = trainer.get_num_updates()
        tables = [pair for pair in named_tables(trainer.get_model()) if pair[1].method.has_codes]
        if not tables or updates == self.updates:
            return
        writer = _tensorboard(trainer.cfg)
        before, self.updates = self.updates, updates
        rows: list[dict[str, float]] = []
        full = compact = 0.0
        for name, table in tables:
            if table.is_plain:
                now, last, _ = table.schedule_counts()
                logger.info(f"{name}: no codes yet, update {now} of {last} of the warm-up")
                continue
            skipped = table.trackers.skipped()
            if skipped:
                logger.warning(
                    f"{name}: {skipped} sums of queries were not finite and left out of the "
                    "statistics: some rows hold NaN or overflow; lower the learning rate"
                )
            codes = table.codes().cpu()
            counts = code_counts(codes, table.config.K, table.padding_idx)
            row = self._row(name, table, codes, counts)
            rows.append(row)
            text = f"{row['used']:.1%} of codes used, entropy {row['entropy']:.2f} bits"
            if "changed" in row:
                text += f", {row['changed']:.2%} changed since update {before}"
            logger.info(f"{name}: {text}, compression ratio {row['ratio']:.1f} (update {updates})")
            if writer is not None:
                for key, value in row.items():
                    writer.add_scalar(f"{name}/{key}", value, updates)
                writer.add_histogram(f"{name}/symbols_per_code", counts.flatten(), updates)
                writer.flush()
            possible = math.log2(min(table.config.K, table.num_embeddings))
            if row["used"] < _COLLAPSED or row["entropy"] < _COLLAPSED * possible:
                hints = table.method.collapse_hints(table.config)
                flags = " or ".join(format_flag(*hint) for hint in hints)
                logger.warning(
                    f"{name}: the codes collapse ({text})" + (f". Try {flags}" if flags else "")
                )
            full += table.num_embeddings * table.embedding_dim
            compact += table.num_embeddings * table.embedding_dim / row["ratio"]
        if not rows:
            return
        keys = [k for k in ("used", "entropy", "changed") if all(k in row for row in rows)]
        self.stats = {f"dpq_{k}": sum(row[k] for row in rows) / len(rows) for k in keys}
        self.stats["dpq_ratio"] = full / compact

    def _row(
        self, name: str, table: DPQEmbedding, codes: Tensor, counts: Tensor
    ) -> dict[str, float]:
        usage = usage_of_counts(counts)
        possible = min(table.config.K, table.num_embeddings)
        row = {
            "used": usage["used"].float().mean().item() / possible,
            "entropy": usage["entropy"].mean().item(),
            "ratio": table.compression_ratio(),
        }
        before = self.codes.get(name)
        if before is not None and before.shape == codes.shape:
            row["changed"] = (before != codes).float().mean().item()
        self.codes[name] = codes
        return row

    def log(self) -> None:
        """Log the last statistics in fairseq's metrics, as they are: not averaged over updates."""
        from fairseq.logging import metrics

        for key in self.stats:
            value = functools.partial(self._value, key)
            metrics.log_derived(key, value, priority=160)

    def _value(self, key: str, meters: Any) -> float:
        return round(self.stats.get(key, math.nan), 4)


def _tensorboard(cfg: Any) -> Any:
    """A writer of the folder `dpq` among fairseq's own, which it closes at exit; None without
    --tensorboard-logdir, without tensorboard, and on all workers but the first."""
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
