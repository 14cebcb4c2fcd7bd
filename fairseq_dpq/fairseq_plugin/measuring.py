"""The token tables that a fairseq-train command would build, without training."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from typing import Any, Iterator, Sequence

import torch

from fairseq_dpq.config import DPQConfigError, flag
from fairseq_dpq.fairseq_plugin.choosing import choose
from fairseq_dpq.fairseq_plugin.replace import find_tables
from fairseq_dpq.model import EmbeddingTable


def tables_of_command(words: Sequence[str], embeddings: str) -> list[tuple[str, int, int]]:
    """Path, rows and columns of the tables that `embeddings` selects, as `--dpq-embeddings` does;
    `words` are the flags of fairseq-train without those of DPQ."""
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with _arguments(words), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg = convert_namespace_to_omegaconf(parse_command(words))
        found = find_tables(_build(tasks, cfg))
    if not found:
        raise DPQConfigError("the model of this command has no token embedding (embed_tokens)")
    chosen = choose([table.paths for table in found], embeddings, flag("embeddings"))
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


def _build(tasks: Any, cfg: Any) -> Any:
    """The model: without memory for its weights where torch can do that."""
    task = tasks.setup_task(cfg.task)
    if hasattr(torch.device, "__enter__"):
        with contextlib.suppress(Exception), torch.device("meta"):
            return task.build_model(cfg.model)
    return task.build_model(cfg.model)


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
