"""Models that are built without training: the token tables of a fairseq-train command, and whether
fairseq loads a checkpoint that was just written."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import torch

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.fairseq_plugin.options import choose
from fairseq_dpq.fairseq_plugin.replace import find_tables
from fairseq_dpq.model import EmbeddingTable


def _build(cfg: Any, device: Any = None, **kwargs: Any) -> Any:
    """The model of a config with `task` and `model`."""
    from fairseq import tasks

    with warnings.catch_warnings(), device or contextlib.nullcontext():
        warnings.simplefilter("ignore")
        return tasks.setup_task(cfg["task"]).build_model(cfg["model"], **kwargs)


def _devices() -> list[Any]:
    """Where to build: without memory for the weights if torch can do that, then as fairseq does."""
    return [torch.device("meta"), None] if hasattr(torch.device, "__enter__") else [None]


def tables_of_command(words: Sequence[str], embeddings: str) -> list[tuple[str, int, int]]:
    """Path, rows and columns of the tables that `embeddings` selects, as `--dpq-embeddings` does;
    `words` are the flags of fairseq-train without those of DPQ."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with _arguments(words), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = find_tables(_model(convert_namespace_to_omegaconf(parse_command(words))))
    if not found:
        raise DPQConfigError("the model of this command has no token embedding (embed_tokens)")
    chosen = choose([table.paths for table in found], embeddings)
    return [_size(found[i]) for i in chosen]


def parse_command(words: Sequence[str]) -> Any:
    """The options of fairseq-train; DPQConfigError with its own message for what it refuses."""
    from fairseq import options

    said = io.StringIO()
    try:
        with _arguments(words), contextlib.redirect_stderr(said):
            return options.parse_args_and_arch(options.get_training_parser(), list(words))
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["error: it cannot be parsed"]
        raise DPQConfigError(f"fairseq-train refuses the command: {lines[-1]}") from None
    except (ValueError, OSError, ImportError) as error:
        raise DPQConfigError(f"fairseq-train refuses the command: {error}") from error


def _model(cfg: Any) -> Any:
    *others, last = _devices()
    for device in others:
        with contextlib.suppress(Exception):
            return _build(cfg, device)
    return _build(cfg, last)


def _size(found: EmbeddingTable) -> tuple[str, int, int]:
    weight: Any = getattr(found.module, "weight", None)
    if weight is None or weight.dim() != 2:
        kind = type(found.module).__name__
        raise DPQConfigError(f"{found.path} is of type {kind}, not a plain table")
    return (found.path, *weight.shape)


@contextlib.contextmanager
def _arguments(words: Sequence[str]) -> Iterator[None]:
    """fairseq looks for --user-dir in sys.argv, and logs what it builds."""
    old, level = sys.argv, logging.root.manager.disable
    sys.argv = ["fairseq-train", *words]
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        sys.argv = old
        logging.disable(level)


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
    problem = ""
    for device in _devices():
        try:
            model = _build(state["cfg"], device, from_checkpoint=True)
        except (
            Exception
        ):  # a task of the user's own, data that are incomplete, a model without meta
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
