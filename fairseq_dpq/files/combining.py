"""Weights that are put together before compaction: the EMA copy, the average of checkpoints."""

from __future__ import annotations

from typing import Hashable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.files.checkpoint import Checkpoint, check_warmed_up
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.memory import identity


def has_ema(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint carries the weights that --store-ema averages in training."""
    extra = checkpoint.state.get("extra_state")
    return isinstance(extra, Mapping) and isinstance(extra.get("ema"), Mapping)


def with_ema(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its EMA weights in the model's place, as fairseq's
    `save_ema_as_checkpoint` writes it."""
    if not has_ema(checkpoint):
        raise CheckpointError(
            f"--ema: {checkpoint.path} has no EMA weights; it was trained without --store-ema"
        )
    ema = checkpoint.state["extra_state"]["ema"]
    if set(ema) != set(checkpoint.weights):
        raise CheckpointError(
            f"--ema: the EMA weights of {checkpoint.path} are not those of its model"
        )
    model = {key: ema[key] for key in checkpoint.weights}
    for path in checkpoint.dpq_record().tables:
        key = f"{path}.schedule"  # a count: an average of it is of no use
        if key in model:
            model[key] = checkpoint.weights[key]
    model = {key: t.float() if t.dtype == torch.float16 else t for key, t in model.items()}
    return Checkpoint(checkpoint.path, {**checkpoint.state, "model": model}, checkpoint.file_bytes)


def average(checkpoints: list[Checkpoint]) -> Checkpoint:
    """The mean of training checkpoints, computed as fairseq's average_checkpoints.py does."""
    first = checkpoints[0]
    for checkpoint in checkpoints:
        _check_alike(first, checkpoint)
        for path in checkpoint.dpq_record().tables:
            check_warmed_up(checkpoint, path)
    total: dict[str, Tensor] = {}
    sums: dict[Hashable, Tensor] = {}  # one for the names of a shared tensor
    for key, tensor in first.weights.items():
        place = identity(tensor)
        if place not in sums:
            sums[place] = _mean([checkpoint.weights[key] for checkpoint in checkpoints])
        total[key] = sums[place]
    return Checkpoint(first.path, {**first.state, "model": total}, first.file_bytes)


def _mean(tensors: list[Tensor]) -> Tensor:
    kind = tensors[0].dtype
    half = kind in (torch.float16, torch.bfloat16)
    total = tensors[0].to(torch.float32 if half else kind, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    if kind == torch.bool:
        return total
    if not total.is_floating_point():
        return torch.div(total, len(tensors), rounding_mode="floor")
    # float16 stays float32, as in fairseq; bfloat16 is rounded once, not at each sum.
    return total.div_(len(tensors)).to(kind if kind != torch.float16 else torch.float32)


def _check_alike(first: Checkpoint, other: Checkpoint) -> None:
    record = other.dpq_record()
    if record.stage == "compact":
        raise CheckpointError(
            f"--average: {other.path} is compact, and codes cannot be averaged; average the "
            "training checkpoints first: fairseq-dpq-compact TRAINED1.pt TRAINED2.pt OUT.pt "
            "--average" + (f" ({other.path} was made of {record.source})" if record.source else "")
        )
    if record.tables != first.dpq_record().tables:
        raise CheckpointError(
            f"--average: {other.path} and {first.path} have different DPQ tables or options"
        )
    for key, tensor in first.weights.items():
        if key not in other.weights or other.weights[key].shape != tensor.shape:
            raise CheckpointError(
                f"--average: {other.path} and {first.path} are different models: {key} differs"
            )
    if len(other.weights) != len(first.weights):
        raise CheckpointError(f"--average: {other.path} and {first.path} are different models")
