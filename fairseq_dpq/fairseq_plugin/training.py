"""DPQ during training: how long the warm-up is, the regulariser in the loss, statistics after each
update, the log. Functions with `old` are hooks (`hooks.py`).

Every criterion is called with the model, so the regularisers of its tables are collected there.
They are added once, scaled by the criterion's sample size.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from typing import Any, Callable

import torch
from torch import Tensor, nn

from fairseq_dpq.config import DPQConfigError, format_flag
from fairseq_dpq.fairseq_plugin.configs import get_option, read_record, write_record
from fairseq_dpq.fairseq_plugin.layers import FairseqDPQEmbedding
from fairseq_dpq.fairseq_plugin.options import read_options
from fairseq_dpq.layer import DPQEmbedding, dpq_modules
from fairseq_dpq.training.codes import code_counts, usage_of_counts

logger = logging.getLogger("fairseq_dpq")

REGULARIZER_KEY = "dpq_regularizer"
WEIGHT_KEY = "dpq_regularizer_weight"
_COLLAPSED = 0.25  # of the codes in use, or of the entropy that is possible
_UNKNOWN = 8  # updates, until the data is loaded: enough for a warm-up to exist at all


def _named_tables(model: nn.Module) -> list[tuple[str, DPQEmbedding]]:
    """The DPQ tables of a model, each once, by path."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, DPQEmbedding)]


# The length of the training -----------------------------------------------------------------------
# --max-update is known when the model is built. --max-epoch is a number of updates only once the
# data is loaded, so that tables get their schedule then.


def planned_updates(option: Callable[[str], Any], batches: int | None = None) -> int:
    """The number of updates of the whole training, whichever limit comes first, 0 if it has no
    end; without the batches of an epoch, as far as it is known. `option` reads those of fairseq's
    optimization group."""
    most, epochs = (int(option(name) or 0) for name in ("max_update", "max_epoch"))
    if not epochs or (batches is None and most):
        return most
    if batches is None:
        return _UNKNOWN
    each = list(option("update_freq") or [1])
    total = sum(-(-batches // each[min(epoch, len(each) - 1)]) for epoch in range(epochs))
    return min(total, most) if most else total


def settle_schedules(old: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Set the schedules that were left open, as soon as the batches of an epoch are known."""
    batches = old(trainer, *args, **kwargs)
    cfg, found = trainer.cfg, _named_tables(trainer.get_model())
    tables = {path: table for path, table in found if getattr(table, "open_schedule", None)}
    if not tables:
        return batches
    length = planned_updates(lambda name: get_option(cfg.optimization, name), len(batches))
    record = read_record(cfg.model)
    for path, table in tables.items():
        assert isinstance(table, FairseqDPQEmbedding) and table.open_schedule is not None
        (wanted, use), table.open_schedule = table.open_schedule, None
        now, plain, _ = table.schedule_counts()
        started = now > 0
        if not length or not plain or (started and now != plain):
            continue  # the last: codes that a DPQ checkpoint brought
        config = wanted.resolved(use._replace(max_update=max(length, _UNKNOWN)))
        table.set_schedule(config, started)
        if record is not None and path in record.tables:
            record.tables[path].options = config.keywords()
            write_record(cfg.model, record)
        _, plain, last = table.schedule_counts()
        ramp = f"the full table gives way to quantised rows until update {last - plain}"
        logger.info(f"{path}: {ramp if started else config.method.describe_start(config)}")
    return batches


# Each update --------------------------------------------------------------------------------------

_depth = 0  # a criterion may call others; the outermost one adds the regulariser


def add_regularizer(
    old: Callable, criterion: Any, model: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any, Any]:
    """Add the tables' regularisers to the (loss, sample_size, logging_output) of any criterion,
    once for each batch."""
    global _depth
    tables = list(dpq_modules(model)) if isinstance(model, nn.Module) else []
    if not _depth and tables and not model.training:
        _drop_regularizers(tables)  # of passes outside the criterion, e.g. of --eval-bleu
    _depth += 1
    try:
        result = old(criterion, model, *args, **kwargs)
    except BaseException:  # out of memory, say: the trainer may go on with the next batch
        _drop_regularizers(tables)
        raise
    finally:
        _depth -= 1
    popped = [] if _depth else [table.regularizers.pop() for table in tables]
    pairs = [pair for pair in popped if pair is not None]
    if not pairs:
        return result
    loss, sample_size, logging_output = result
    terms, errors = zip(*pairs)
    if model.training:
        loss = loss + torch.stack(terms).sum() * sample_size
    logging_output[REGULARIZER_KEY] = torch.stack(errors).sum() * sample_size
    logging_output[WEIGHT_KEY] = sample_size
    return loss, sample_size, logging_output


def _drop_regularizers(tables: list[DPQEmbedding]) -> None:
    for table in tables:
        table.regularizers.waiting.clear()


def skip_dummy_batch(old: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the dummy batch of a worker that has run out of data out of the statistics."""
    sample, is_dummy = old(trainer, *args, **kwargs)
    for table in dpq_modules(trainer.model):
        table.ignore_batch = bool(is_dummy)
    return sample, is_dummy


def follow_update(old: Callable, task: Any, optimizer: Any, model: Any, update_num: int) -> None:
    """Update the tables' statistics after each update, identically on all workers."""
    old(task, optimizer, model, update_num)
    for name, table in _named_tables(model):
        if table.regularizers.waiting:
            raise DPQConfigError(
                f"the VQ regulariser of {name} did not reach the loss: the task calls "
                "criterion.forward(model, sample) or uses a model other than the one it passes to "
                "the criterion. It must call criterion(model, sample)"
            )
        if table.is_plain:
            _forget_best()
        if table.step():
            _copy_to_optimizer(table, optimizer)


def _forget_best() -> None:
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
    copies: Any = getattr(optimizer, "fp32_params", None)
    own = getattr(optimizer, "fp16_params", None)
    if copies is None or own is None:
        return
    pairs: list[tuple[Tensor, Tensor]] = []
    if isinstance(copies, dict):  # one flat tensor for each device
        for device, flat in copies.items():
            here = [p for p in own if len(copies) == 1 or p.device.index == device]
            pairs += zip(here, flat.data.split([p.numel() for p in here]))
    else:
        pairs += zip(own, copies)
    mine = {id(p) for p in table.parameters()}
    for p, copy in pairs:
        if id(p) in mine:
            copy.data.view_as(p).copy_(p.data)


# The log ------------------------------------------------------------------------------------------


def log_stats(old: Callable, trainer: Any, logging_outputs: Any, *args: Any, **kw: Any) -> Any:
    """Log the regulariser with each batch, and code use every so many updates."""
    from fairseq.logging import metrics

    with_it = [output for output in logging_outputs or [] if REGULARIZER_KEY in output]
    weight = sum(float(output[WEIGHT_KEY]) for output in with_it)
    if weight:
        value = sum(float(output[REGULARIZER_KEY]) for output in with_it) / weight
        metrics.log_scalar(REGULARIZER_KEY, value, weight, priority=150, round=5)
    watch = _watch_of(trainer)
    if trainer.model.training and watch.every and trainer.get_num_updates() % watch.every == 0:
        watch.look(trainer)
    for key in watch.stats:
        # As they are: not averaged over updates.
        metrics.log_derived(key, lambda _, key=key: watch.stats.get(key, math.nan), priority=160)
    return old(trainer, logging_outputs, *args, **kw)


def look_before_validation(old: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Measure code use before each validation."""
    _watch_of(trainer).look(trainer)
    return old(trainer, *args, **kwargs)


def _watch_of(trainer: Any) -> CodeWatch:
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
        self.stats: dict[str, float] = {}  # the last means over the tables, as they are logged

    @torch.no_grad()
    def look(self, trainer: Any) -> None:
        """Log code use, entropy and change of each table, once for each number of updates."""
        updates = trainer.get_num_updates()
        named = _named_tables(trainer.get_model())
        tables = {name: table for name, table in named if table.method.has_codes}
        if not tables or updates == self.updates:
            return
        rows = {}
        for name, table in tables.items():
            if table.is_plain:
                now, last, _ = table.schedule_counts()
                logger.info(f"{name}: no codes yet, update {now} of {last} of the warm-up")
            else:
                rows[name] = self._look_at(name, table, updates, _tensorboard(trainer.cfg))
        self.updates = updates
        if not rows:
            return
        self.stats = {}
        for key in ("used", "entropy", "changed"):
            if all(key in row for row in rows.values()):
                mean = sum(row[key] for row in rows.values()) / len(rows)
                self.stats[f"dpq_{key}"] = round(mean, 4)
        full = {name: tables[name].num_embeddings * tables[name].embedding_dim for name in rows}
        compact = sum(full[name] / row["ratio"] for name, row in rows.items())
        self.stats["dpq_ratio"] = round(sum(full.values()) / compact, 4)

    def _look_at(
        self, name: str, table: DPQEmbedding, updates: int, writer: Any
    ) -> dict[str, float]:
        """The figures of one table, which it logs."""
        skipped = table.trackers.skipped()
        if skipped:
            logger.warning(
                f"{name}: {skipped} sums of queries were not finite and left out of the "
                "statistics: some rows hold NaN or overflow; lower the learning rate"
            )
        codes = table.codes().cpu()
        counts = code_counts(codes, table.config.K, table.padding_idx)
        usage = usage_of_counts(counts)
        possible = min(table.config.K, table.num_embeddings)
        row = {
            "used": usage["used"].float().mean().item() / possible,
            "entropy": usage["entropy"].mean().item(),
            "ratio": table.compression_ratio(),
        }
        text = f"{row['used']:.1%} of codes used, entropy {row['entropy']:.2f} bits"
        before = self.codes.get(name)
        if before is not None:
            row["changed"] = (before != codes).float().mean().item()
            text += f", {row['changed']:.2%} changed since update {self.updates}"
        self.codes[name] = codes
        logger.info(f"{name}: {text}, compression ratio {row['ratio']:.1f} (update {updates})")
        if writer is not None:
            for key, value in row.items():
                writer.add_scalar(f"{name}/{key}", value, updates)
            writer.add_histogram(f"{name}/symbols_per_code", counts.flatten(), updates)
            writer.flush()
        if row["used"] < _COLLAPSED or row["entropy"] < _COLLAPSED * math.log2(possible):
            hints = table.method.collapse_hints(table.config)
            flags = " or ".join(format_flag(*hint) for hint in hints)
            logger.warning(
                f"{name}: the codes collapse ({text})" + (f". Try {flags}" if flags else "")
            )
        return row


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
