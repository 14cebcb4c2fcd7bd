"""DPQ during training: the regulariser in the loss, statistics after each update, the log.

Every criterion is called with the model, so the regularisers of its tables are collected there.
They are added once, scaled by the criterion's sample size.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_dpq.config import DPQConfigError, format_flag
from fairseq_dpq.fairseq_plugin import tensorboard
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.training.codes import code_counts, usage_of_counts

logger = logging.getLogger("fairseq_dpq")

REGULARIZER_KEY = "dpq_regularizer"
WEIGHT_KEY = "dpq_regularizer_weight"
_COLLAPSED = 0.25  # of the codes in use, or of the entropy that is possible


def named_tables(model: nn.Module) -> list[tuple[str, DPQEmbedding]]:
    """The DPQ tables of a model, DDP-wrapped or not, each once, by path."""
    return [
        (name.replace("module.", "", 1) if name.startswith("module.") else name, m)
        for name, m in model.named_modules()
        if isinstance(m, DPQEmbedding)
    ]


def forget_evaluation(model: Any) -> None:
    """Drop regularisers of evaluation passes outside the criterion, e.g. of --eval-bleu."""
    if isinstance(model, nn.Module) and not model.training:
        for table in model.modules():
            if isinstance(table, DPQEmbedding):
                table.pop_regularizer()


def forget_batch(model: Any) -> None:
    """Drop the regularisers of a batch that failed: they are not the next one's."""
    for table in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(table, DPQEmbedding):
            table.regularizers.drop()


def add_regularizer(model: Any, result: Any) -> Any:
    """Add the tables' regularisers to a criterion's (loss, sample_size, logging_output)."""
    if not isinstance(model, nn.Module):
        return result
    tables = [m for m in model.modules() if isinstance(m, DPQEmbedding)]
    popped = [pair for pair in (m.regularizers.pop() for m in tables) if pair is not None]
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
        if table.has_regularizer():
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


class CodeWatch:
    """Follows the codes of a model's tables through a training."""

    def __init__(self) -> None:
        self.codes: dict[str, Tensor] = {}
        self.updates: int | None = None
        self.stats: dict[str, float] = {}

    @torch.no_grad()
    def look(self, model: nn.Module, updates: int, writer: Any = None) -> None:
        """Log code use, entropy and change of each table, once for each number of updates."""
        tables = [(name, table) for name, table in named_tables(model) if table.has_codes]
        if not tables or updates == self.updates:
            return
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
                tensorboard.write(writer, name, row, counts, updates)
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
