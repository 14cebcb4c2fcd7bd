"""Models that are built without training: the token tables of a fairseq-train command, and whether
fairseq loads a checkpoint that was just written."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Iterator, Sequence

import torch

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.fairseq_plugin.options import choose
from fairseq_dpq.fairseq_plugin.replace import find_tables


def _build(cfg: Any, meta: bool, **kwargs: Any) -> Any:
    """The model of a config with `task` and `model`; `meta`: without memory for its weights, which
    neither every model nor torch 1 can do."""
    from fairseq import tasks

    place: Any = torch.device("meta") if meta else contextlib.nullcontext()
    with place:
        return tasks.setup_task(cfg["task"]).build_model(cfg["model"], **kwargs)


def tables_of_command(words: Sequence[str], embeddings: str) -> list[tuple[str, int, int]]:
    """Path, rows and columns of the tables that `embeddings` selects, as `--dpq-embeddings` does;
    `words` are the flags of fairseq-train without those of DPQ."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with _quiet(words):
        cfg = convert_namespace_to_omegaconf(parse_command(words))
        try:
            model = _build(cfg, meta=True)
        except Exception:
            model = _build(cfg, meta=False)
    sizes = []
    for found in choose(find_tables(model), embeddings):
        if found.weight is None or found.weight.dim() != 2:
            kind = type(found.module).__name__
            raise DPQConfigError(f"{found.path} is of type {kind}, not a plain table")
        rows, columns = found.weight.shape
        sizes.append((found.path, rows, columns))
    return sizes


def parse_command(words: Sequence[str]) -> Any:
    """The options of fairseq-train; DPQConfigError with its own message for what it refuses."""
    from fairseq import options

    said = io.StringIO()
    try:
        with _quiet(words), contextlib.redirect_stderr(said):
            return options.parse_args_and_arch(options.get_training_parser(), list(words))
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["error: it cannot be parsed"]
        raise DPQConfigError(f"fairseq-train refuses the command: {lines[-1]}") from None
    except (ValueError, OSError, ImportError) as error:
        raise DPQConfigError(f"fairseq-train refuses the command: {error}") from error


@contextlib.contextmanager
def _quiet(words: Sequence[str]) -> Iterator[None]:
    """fairseq looks for --user-dir in sys.argv, and logs what it builds."""
    old, level = sys.argv, logging.root.manager.disable
    sys.argv = ["fairseq-train", *words]
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.argv = old
        logging.disable(level)


def loads_in_fairseq(path: Path, cfg: Any) -> bool:
    """Whether fairseq builds the model and takes every tensor; False if the model cannot be built
    here, because its data are elsewhere. DPQConfigError if it is built and does not load."""
    data = get_option(get_option(cfg, "task"), "data")
    if not isinstance(data, str) or not os.path.isdir(data.split(os.pathsep)[0]):
        return False
    from fairseq import checkpoint_utils

    problem: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        except Exception as error:
            raise _failed(error) from error
        for meta in (True, False):
            try:
                model = _build(state["cfg"], meta, from_checkpoint=True)
            except Exception:  # a task of the user's own, or data that are incomplete
                continue
            try:
                weights = dict(state["model"])
                model.load_state_dict(weights, strict=True, model_cfg=state["cfg"]["model"])
                return True
            except Exception as error:
                problem = error
    if problem is not None:
        raise _failed(problem) from problem
    return False


def _failed(problem: Exception) -> DPQConfigError:
    line = " ".join(str(problem).split())[:300] or type(problem).__name__
    return DPQConfigError(f"verification failed: fairseq cannot load the file: {line}")
