"""Restoring a checkpoint into training: the same DPQ options, or an error that shows both."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

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

# Options that change the shapes of tensors; the others may change if the optimiser is reset.
_SHAPES = (
    *("K", "D", "method", "share_subspaces", "key_dim", "normalize", "rank"),
    *("code_width", "distill_from"),
)


# A checkpoint brings its schedule along; another --max-update does not stretch it.
_SCHEDULE = ("warmup_updates", "ramp_updates")


def saved_record(
    save_dir: str | None, restore_file: str | None, finetune_from: str | None = None
) -> TablesRecord | None:
    """The record of the checkpoint that training will go on from, if there is one."""
    places = [Path(save_dir or "", restore_file)] if restore_file else []
    places += [Path(finetune_from)] if finetune_from else []
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    how = {"mmap": True} if "mmap" in inspect.signature(torch.load).parameters else {}
    try:
        state = torch.load(str(path), map_location="cpu", **how)
        return read_record(_model_cfg(state))
    except Exception:  # fairseq reads the file next, and says what is wrong with it
        return None


def _model_cfg(state: Any) -> Any:
    return get_option(state.get("cfg"), "model") if state.get("cfg") else state.get("args")


def adopt(config: DPQConfig, before: Table, record: TablesRecord) -> DPQConfig:
    """Options that were left open, as the checkpoint has them. A checkpoint of version 0.1 goes on
    as 0.1 trained: all options but those that the tensors' shapes follow are its own."""
    own = {}
    for name, value in before.options.items():
        left_open = getattr(config, name) is None or name in _SCHEDULE
        old = record.version == 1 and name not in _SHAPES
        if left_open or old:
            own[name] = value
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
        own = f.name in (_SHAPES if record.version == 1 else method.options) or f.name not in layer
        if own and f.name not in shown:
            shown.append(f.name)
    return " ".join(say_flag(name, getattr(given, name)) for name in shown)
