"""Loads a written checkpoint as fairseq's commands will load it."""

from __future__ import annotations

import contextlib
import os
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Mapping

import torch

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.configs import get_option


def loads_in_fairseq(path: Path, cfg: Any) -> bool:
    """Whether fairseq builds the model and takes every tensor; False if the model cannot be built
    here, because its data are elsewhere. DPQConfigError if it is built and does not load."""
    task = get_option(cfg, "task")
    if not isinstance(task, (Mapping, Namespace)):
        return False
    data = get_option(task, "data")
    if not isinstance(data, str) or not os.path.isdir(data.split(os.pathsep)[0]):
        return False
    from fairseq import checkpoint_utils

    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    except Exception as error:
        raise _failed(_line(error)) from error
    # Without memory for the weights where torch can do that; then as fairseq itself does it.
    problem = ""
    for device in [torch.device("meta"), None] if hasattr(torch.device, "__enter__") else [None]:
        model = _build(state, device)
        if model is None:
            continue
        problem = _load(model, state)
        if not problem:
            return True
    if problem:
        raise _failed(problem)
    return False


def _failed(problem: str) -> DPQConfigError:
    return DPQConfigError(f"verification failed: fairseq cannot load the file: {problem}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _build(state: Any, device: Any) -> Any:
    from fairseq import tasks

    try:
        with warnings.catch_warnings(), device or contextlib.nullcontext():
            warnings.simplefilter("ignore")
            task = tasks.setup_task(state["cfg"]["task"])
            return task.build_model(state["cfg"]["model"], from_checkpoint=True)
    except Exception:  # a task of the user's own, data that are incomplete, a model without meta
        return None


def _load(model: Any, state: Any) -> str:
    """What is wrong, in a line; empty if every tensor was taken."""
    weights = dict(state["model"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_state_dict(weights, strict=True, model_cfg=state["cfg"]["model"])
    except Exception as error:
        return _line(error)
    return ""
