"""Checkpoints of older fairseq as the present one loads them: parameter names, and `cfg` of `args`.
What fairseq does in passing at each load has to be done here before anything is written."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any, Mapping

from torch import Tensor

from fairseq_dpq.fairseq_plugin.configs import set_options
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import CheckpointError

_OLD_ROBERTA = "decoder.sentence_encoder."


def upgraded_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict under today's names: RoBERTa's encoder was its decoder until fairseq 0.10."""
    old = any(key.startswith(_OLD_ROBERTA) for key in weights)
    if not old or any(key.startswith("encoder.") for key in weights):
        return dict(weights)
    return {
        "encoder" + key[len("decoder") :] if key.startswith("decoder.") else key: tensor
        for key, tensor in weights.items()
    }


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
