"""Restoring a checkpoint into training: the same DPQ options, or an error that shows both."""

from __future__ import annotations

import inspect
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch

from fairseq_dpq.config import (
    DPQConfig,
    DPQConfigError,
    PluginConfig,
    flag,
    flag_fields,
    say_flag,
)
from fairseq_dpq.fairseq_plugin.configs import get_option, read_record
from fairseq_dpq.fairseq_plugin.options import has_options, read_options
from fairseq_dpq.methods import METHODS
from fairseq_dpq.record import Table, TablesRecord
from fairseq_dpq.statistics import WarmUp

logger = logging.getLogger("fairseq_dpq")

_LAST = "checkpoint_last.pt"  # fairseq looks for a file of this name in --save-dir

# Options that change the shapes of tensors; the others may change if the optimiser is reset.
_SHAPES = (
    *("K", "D", "method", "share_subspaces", "key_dim", "normalize", "rank"),
    *("code_width", "distill_from"),
)


# A checkpoint brings its schedule along; another --max-update does not stretch it.
_SCHEDULE = ("warmup_updates", "ramp_updates")


class Saved(NamedTuple):
    """What the checkpoint has that training will go on from."""

    record: TablesRecord
    anew: bool  # with a new optimiser: the command's options count


def saved(option: Callable[[str], Any]) -> Saved | None:
    """The record of the checkpoint that training will go on from, if there is one.

    `option` gives the options of fairseq's checkpoint group, e.g. save_dir. The file is the one
    that fairseq's `load_checkpoint` takes.
    """
    restore_file = option("restore_file")
    if not restore_file:
        return None
    path, anew = Path(restore_file), bool(option("reset_optimizer"))
    if restore_file == _LAST:
        path = Path(option("save_dir") or "", _LAST)
        if not path.exists() and option("continue_once"):
            path = Path(option("continue_once"))
        elif not path.exists() and option("finetune_from_model"):
            path, anew = Path(option("finetune_from_model")), True
    record = _record(path) if path.is_file() else None
    return None if record is None else Saved(record, anew)


def _record(path: Path) -> TablesRecord | None:
    how = {"mmap": True} if "mmap" in inspect.signature(torch.load).parameters else {}
    try:
        state = torch.load(str(path), map_location="cpu", **how)
        return read_record(_model_cfg(state))
    except Exception:  # fairseq reads the file next, and says what is wrong with it
        return None


def _model_cfg(state: Any) -> Any:
    return get_option(state.get("cfg"), "model") if state.get("cfg") else state.get("args")


def adopt(config: DPQConfig, path: str, saved: Saved) -> DPQConfig:
    """Options that were left open, as the checkpoint's table at `path` has them. A training that
    version 0.1 began goes on as 0.1 trained: all options but those that the tensors' shapes follow
    are its own. With a new optimiser, what the command gives counts."""
    own = {}
    defaults = {f.name: f.default for f in fields(DPQConfig)}
    for name, value in saved.record.tables[path].options.items():
        given = getattr(config, name)
        is_given = given is not None and given != defaults[name]
        old = saved.record.origin == 1 and name not in _SHAPES
        if given is None or ((old or name in _SCHEDULE) and not (saved.anew and is_given)):
            own[name] = value
            if name in _SCHEDULE and is_given and given != value:
                logger.warning(
                    f"{path}: {say_flag(name, given)} has no effect: the schedule of the "
                    f"checkpoint goes on ({say_flag(name, value)}); --reset-optimizer takes the "
                    "new one"
                )
    return replace(config, **own)


def check_restore(model_cfg: Any, state: Any, filename: str, reset_optimizer: bool) -> None:
    """Compare a checkpoint's DPQ tables with those of the model that would load it."""
    saved_cfg = _model_cfg(state)
    saved = read_record(saved_cfg)
    current = read_record(model_cfg)
    if saved is not None and saved.stage == "compact":
        source = f": {saved.source}" if saved.source else ""
        raise DPQConfigError(
            f"{filename} is a compact checkpoint: the queries and the optimiser state that "
            f"training needs are gone. Restore the training checkpoint it was made from{source}"
        )
    if saved is None and current is None:
        return
    if current is None:
        assert saved is not None
        raise DPQConfigError(
            f"{filename} was trained with DPQ, but this command has no DPQ options. Add "
            f"{_flags(saved_cfg, saved)}"
        )
    if saved is None:
        if not reset_optimizer:
            raise DPQConfigError(
                f"{filename} has full tables, but this command asks for DPQ "
                f"({_flags(model_cfg, current)}). "
                "To start the DPQ tables from them by k-means, use --finetune-from-model "
                f"{filename}, or --restore-file with --reset-optimizer --reset-lr-scheduler "
                "--reset-dataloader --reset-meters"
            )
        return
    _same_tables(saved, current, filename, reset_optimizer, _flags(saved_cfg, saved))
    for path, table in current.tables.items():
        schedule = {"schedule": state["model"].get(f"{path}.schedule", torch.zeros(2))}
        if WarmUp.is_plain(schedule) and not table.options.get("warmup_updates"):
            raise DPQConfigError(
                f"{path} is still in its warm-up in {filename} and has no codes: leave out "
                "--dpq-warmup-updates 0"
            )


def _same_tables(
    saved: TablesRecord, current: TablesRecord, filename: str, reset_optimizer: bool, flags: str
) -> None:
    if list(saved.tables) != list(current.tables):
        raise DPQConfigError(
            f"{filename} has DPQ tables at {', '.join(saved.tables)}; with this command's "
            f"--dpq-embeddings they are at {', '.join(current.tables)}. The checkpoint's options: "
            f"{flags}"
        )
    differences, shapes = [], False
    for path, before in saved.tables.items():
        for name, old in before.options.items():
            new = current.tables[path].options.get(name)
            if old != new and (name in _SHAPES or not reset_optimizer):
                differences.append(f"{path}: {_both(name, old, new)}")
                shapes = shapes or name in _SHAPES
    if differences:
        other = "use another --save-dir"
        if not shapes:
            other += ", or use the new ones with --reset-optimizer"
        raise DPQConfigError(
            f"{filename} was trained with DPQ options other than those of this command: "
            + "; ".join(differences)
            + f". Use the checkpoint's options ({flags}), {other}"
        )


def _both(name: str, old: Any, new: Any) -> str:
    if name == "normalize":
        old, new = not old, not new
    return f"{flag(name)} {old} in the checkpoint, {new} here"


def _flags(cfg: Any, record: TablesRecord) -> str:
    """The DPQ options of a model's config as flags to paste: its size, and all that were given."""
    table: Table = next(iter(record.tables.values()))
    given = read_options(cfg) if has_options(cfg) else PluginConfig(**table.config.layer_options())
    method = METHODS[given.method]
    shown = [method.switch, *(["D"] if method.has_codes else []), "method"]
    others = [f for f in flag_fields() if getattr(given, f.name) not in (None, f.default)]
    layer = {f.name for f in fields(DPQConfig)}
    for f in others:
        # Options of version 0.1 had other defaults, and are taken over.
        own = f.name in (_SHAPES if record.origin == 1 else method.options) or f.name not in layer
        if own and f.name not in shown:
            shown.append(f.name)
    return " ".join(say_flag(name, getattr(given, name)) for name in shown)
