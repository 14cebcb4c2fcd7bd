"""Restoring a checkpoint into training: the same DPQ options, or an error that shows both."""

from __future__ import annotations

import inspect
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist

from fairseq_dpq.config import DPQConfigError, flag, format_flag
from fairseq_dpq.fairseq_plugin.configs import model_config, read_record
from fairseq_dpq.fairseq_plugin.options import has_options, make_plugin_options, read_options
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.methods import MethodOptions
from fairseq_dpq.methods.base import all_options

logger = logging.getLogger("fairseq_dpq")

_LAST = "checkpoint_last.pt"  # fairseq looks for a file of this name in --save-dir


class Saved(NamedTuple):
    """What training goes on from."""

    tables: dict[str, Table]  # those of the checkpoint, if there is one
    anew: bool = False  # with a new optimiser: the command's options count
    trained: bool = False  # whether the command names a trained model to begin at


NOTHING = Saved({})


def saved(option: Callable[[str], Any]) -> Saved:
    """The tables of the checkpoint that training will go on from.

    `option` gives the options of fairseq's checkpoint group, e.g. save_dir. The file is the one
    that fairseq's `load_checkpoint` takes. The first worker's copy counts: as in fairseq, the
    others need not see the file.
    """
    restore_file, tuned = option("restore_file"), option("finetune_from_model")
    anew = bool(option("reset_optimizer"))
    trained = bool(tuned) or anew
    path = Path(restore_file or "")
    if restore_file == _LAST:
        path = Path(option("save_dir") or "", _LAST)
        if not path.exists() and option("continue_once"):
            path = Path(option("continue_once"))
        elif not path.exists() and tuned:
            path, anew = Path(tuned), True
    found = [(_record_text(path) if path.is_file() else None, anew)]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found, 0)
    text, anew = found[0]
    return Saved({} if text is None else TablesRecord.from_json(text).tables, anew, trained)


def _record_text(path: Path) -> str | None:
    how = {"mmap": True} if "mmap" in inspect.signature(torch.load).parameters else {}
    try:
        state = torch.load(str(path), map_location="cpu", **how)
        record = read_record(model_config(state))
    except Exception:  # fairseq reads the file next, and says what is wrong with it
        return None
    return None if record is None else record.to_json()


def adopt(config: MethodOptions, path: str, saved: Saved) -> MethodOptions:
    """Options that were left open, as the checkpoint's table at `path` has them. Of those that a
    checkpoint keeps, as the schedule, what the command gives counts only with a new optimiser."""
    before = saved.tables[path].options
    own = {}
    if before["method"] != config.method.name:
        return config  # `check_restore` says what is wrong
    for f in fields(config):
        name = f.name
        given, value = getattr(config, name), before[name]
        other, _, wanted = f.metadata["needs"].partition("=")
        if wanted and getattr(config, other) not in (None, wanted):
            continue  # of the checkpoint's schedule, and the command gives another one
        if given is None:
            own[name] = value
        elif f.metadata["keeps"] and not saved.anew and given != value:
            own[name] = value
            logger.warning(
                f"{path}: {format_flag(name, given)} has no effect: the checkpoint's value counts "
                f"({format_flag(name, value)}); --reset-optimizer takes the new one"
            )
    return replace(config, **own)


def check_restore(model_cfg: Any, state: Any, filename: str, reset_optimizer: bool) -> None:
    """Compare a checkpoint's DPQ tables with those of the model that would load it."""
    saved_cfg = model_config(state)
    saved, current = read_record(saved_cfg), read_record(model_cfg)
    if saved is not None and saved.stage == "compact":
        source = f": {saved.source}" if saved.source else ""
        raise DPQConfigError(
            f"{filename} is a compact checkpoint: the queries and the optimiser state that "
            f"training needs are gone. Restore the training checkpoint it was made from{source}"
        )
    if saved is not None and current is not None:
        _same_tables(saved, current, filename, reset_optimizer, _flags(saved_cfg, saved))
    elif saved is not None:
        raise DPQConfigError(
            f"{filename} was trained with DPQ, but this command has no DPQ options. Add "
            f"{_flags(saved_cfg, saved)}"
        )
    elif current is not None and not reset_optimizer:
        raise DPQConfigError(
            f"{filename} has full tables, but this command asks for DPQ "
            f"({_flags(model_cfg, current)}). To start the DPQ tables from them by k-means, use "
            f"--finetune-from-model {filename}, or --restore-file with --reset-optimizer "
            "--reset-lr-scheduler --reset-dataloader --reset-meters"
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
    known = all_options()
    differences, shapes = [], False
    for path, before in saved.tables.items():
        for name, old in before.options.items():
            new = current.tables[path].options.get(name)
            fixed = name == "method" or known[name].metadata["shapes"]
            if old != new and (fixed or not reset_optimizer):
                differences.append(f"{path}: {flag(name)} {old} in the checkpoint, {new} here")
                shapes = shapes or fixed
    if differences:
        other = "use another --save-dir"
        if not shapes:
            other += ", or use the new ones with --reset-optimizer"
        raise DPQConfigError(
            f"{filename} was trained with DPQ options other than those of this command: "
            + "; ".join(differences)
            + f". Use the checkpoint's options ({flags}), {other}"
        )


def _flags(cfg: Any, record: TablesRecord) -> str:
    """The DPQ options of a model's config as flags to paste: its size, and all that were given."""
    table: Table = next(iter(record.tables.values()))
    options = read_options(cfg) if has_options(cfg) else make_plugin_options(table.options)
    size = (options.switch, "D", "method")
    words = {name: table.options[name] for name in size if name in table.options}
    words.update({**options.given, **options.changed()})
    return " ".join(format_flag(name, value) for name, value in words.items())
