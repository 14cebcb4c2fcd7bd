"""What is done to checkpoints before others are made of them: the EMA copy, the average of several,
and those of older fairseq as the present one loads them. What fairseq does in passing at each load
has to be done here before anything is written."""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from typing import Any, Mapping

import torch
from torch import Tensor

from fairseq_dpq.fairseq_plugin.configs import set_options
from fairseq_dpq.files.checkpoint import Checkpoint, each_once
from fairseq_dpq.files.errors import CheckpointError

_OLD_ROBERTA = "decoder.sentence_encoder."


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
    ema, weights = checkpoint.state["extra_state"]["ema"], checkpoint.weights
    if set(ema) != set(weights):
        raise CheckpointError(
            f"--ema: the EMA weights of {checkpoint.path} are not those of its model"
        )
    # A schedule is a count: an average of it is of no use.
    counts = {f"{path}.schedule" for path in checkpoint.dpq_record().tables}
    model = {key: weights[key] if key in counts else ema[key] for key in weights}
    model = {key: t.float() if t.dtype == torch.float16 else t for key, t in model.items()}
    return checkpoint.with_weights(model)


def average(checkpoints: list[Checkpoint]) -> Checkpoint:
    """The mean of training checkpoints, computed as fairseq's average_checkpoints.py does."""
    first = checkpoints[0]
    for checkpoint in checkpoints:
        _check_alike(first, checkpoint)
        for path in checkpoint.dpq_record().tables:
            checkpoint.check_warmed_up(path)

    def mean(key: str, _: Tensor) -> Tensor:
        return _mean([checkpoint.weights[key] for checkpoint in checkpoints])

    return first.with_weights(each_once(first.weights, mean))


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
    mine, theirs = ({key: t.shape for key, t in c.weights.items()} for c in (first, other))
    for key in {**mine, **theirs}:
        if mine.get(key) != theirs.get(key):
            raise CheckpointError(
                f"--average: {other.path} and {first.path} are different models: {key} differs"
            )


# Older fairseq ------------------------------------------------------------------------------------


def upgraded_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict under today's names: RoBERTa's encoder was its decoder until fairseq 0.10."""
    old = any(key.startswith(_OLD_ROBERTA) for key in weights)
    if not old or any(key.startswith("encoder.") for key in weights):
        return dict(weights)
    return {re.sub(r"^decoder\.", "encoder.", key): tensor for key, tensor in weights.items()}


def _interpolates(value: Any) -> bool:
    """Whether a value, or one inside it, asks OmegaConf to look something up."""
    if isinstance(value, Mapping):
        return any(map(_interpolates, [*value.keys(), *value.values()]))
    if isinstance(value, (list, tuple)):
        return any(map(_interpolates, value))
    return isinstance(value, str) and "${" in value


def upgraded_cfg(checkpoint: Checkpoint) -> Any:
    """A copy of the config to write; made of `args` where there are any, as fairseq does it.

    An architecture with a dataclass keeps of `args` only what that dataclass knows, so that a
    record of DPQ tables in them would be lost at the next load.
    """
    args = checkpoint.state.get("args")
    if args is None:
        return copy.deepcopy(checkpoint.state.get("cfg"))
    from fairseq import checkpoint_utils
    from omegaconf import OmegaConf

    fields = copy.deepcopy(vars(args) if isinstance(args, Namespace) else dict(args))
    if not all(isinstance(key, str) for key in fields):
        raise CheckpointError(f"{checkpoint.path} is not a fairseq checkpoint: bad names in args")
    for key, value in fields.items():
        if _interpolates(value):  # fairseq would look it up here, `${oc.env:TOKEN}` too
            raise CheckpointError(
                f"{checkpoint.path}: {key} in its args is an interpolation, ${{...}}; no argument "
                "of fairseq is. Remove it from the file"
            )
    args = Namespace()
    vars(args).update(fields)
    history = {"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    old = {"args": args, "optimizer_history": [history], "extra_state": {}}
    try:
        cfg = checkpoint_utils._upgrade_state_dict(old)["cfg"]
        cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)  # as fairseq saves it
    except Exception as error:
        names = f"--arch {getattr(args, 'arch', None)} --task {getattr(args, 'task', None)}"
        raise CheckpointError(
            f"{checkpoint.path}: fairseq makes no config of its args ({names}): "
            f"{type(error).__name__}: {error}. If they are your own, import the module that "
            "registers them first, then call the tool's main() from Python"
        ) from error
    if cfg.get("model") is None:
        raise CheckpointError(f"{checkpoint.path} is not a fairseq checkpoint: no arch in its args")
    set_options(cfg["model"], {k: v for k, v in vars(args).items() if k.startswith("dpq_")})
    return cfg
