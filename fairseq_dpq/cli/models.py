"""A fairseq model and its task from a checkpoint, for the tools that run models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import CheckpointError


def load_model(path: Path, task: str, changes: dict[str, Any], fix: str) -> tuple[Any, Any]:
    """(model, task) of a checkpoint of --task `task`; `changes` are options of the task that
    differ from training, `fix` says what to do about a model of another task."""
    state = Checkpoint.load(path).state  # with the allow-list, and its errors in one line
    own = get_option(get_option(state.get("cfg"), "task"), "_name")
    if own != task:
        raise CheckpointError(f"{path} is a model of --task {own}, not of --task {task}{fix}")
    data = changes.get("data") or get_option(get_option(state["cfg"], "task"), "data")
    if not Path(str(data)).is_dir():
        raise CheckpointError(
            f"no folder {data}, where the checkpoint's dictionaries were; name it by --data"
        )
    del state  # fairseq reads the file itself; one copy in memory is enough
    from fairseq import checkpoint_utils

    try:
        models, _, loaded = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides=changes
        )
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        what = str(error).split("\n", 1)[-1].strip()
        raise CheckpointError(
            f"{path} does not fit the dictionaries in {data}; name the folder that it was trained "
            f"on by --data ({what})"
        ) from error
    return models[0], loaded
