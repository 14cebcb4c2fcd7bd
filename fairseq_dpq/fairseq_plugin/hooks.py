"""What DPQ does inside fairseq's own functions, and where: `attach` installs the hooks, here those
of building and loading; those of each update are in `training.py`.

Each gets the function that it stands for as `old`, then that function's arguments. With DPQ off,
they all behave as fairseq does. Without them the options exist, but no table is replaced.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin import options, replace, resume, training, validation
from fairseq_dpq.fairseq_plugin.configs import (
    drop_options,
    get_option,
    read_record,
    run_option,
    set_options,
    take_options,
    write_record,
)
from fairseq_dpq.fairseq_plugin.patching import around
from fairseq_dpq.files.record import EXACT_KEY, RECORD_KEY
from fairseq_dpq.marker import marked

_FROM_CHECKPOINT = "_dpq_from_checkpoint"  # marks a task that was built from a checkpoint's config


def build_model(
    old: Callable, cfg: Any, task: Any, from_checkpoint: bool = False, **kwargs: Any
) -> Any:
    """Build the stock model, then replace its tables."""
    # fairseq refuses keys that a model's dataclass does not have, or drops them in place.
    kept = take_options(cfg, [*options.config_keys(), RECORD_KEY, EXACT_KEY])
    try:
        model = old(cfg, task, from_checkpoint, **kwargs)
    finally:
        set_options(cfg, kept)
    record = read_record(cfg)
    if record is not None:
        replace.restore_tables(model, record, bool(get_option(cfg, EXACT_KEY)))
        return model
    # A checkpoint has its own options: in an ensemble the task may be that of another one.
    stored = from_checkpoint or getattr(task, _FROM_CHECKPOINT, False)
    own = stored or options.has_options(cfg)
    # Older tasks have args instead of cfg.
    of_task = getattr(task, "cfg", None) or getattr(task, "args", None)
    chosen = options.read_options(cfg if own else of_task)
    if chosen.enabled:
        if run_option(cfg, "distributed_training", "ddp_backend") == "fully_sharded":
            raise DPQConfigError(
                "--ddp-backend fully_sharded: it keeps only a part of each DPQ table on a worker, "
                "and statistics need the whole; use pytorch_ddp or legacy_ddp"
            )
        updates = training.planned_updates(functools.partial(run_option, cfg, "optimization"))
        saved = resume.saved(functools.partial(run_option, cfg, "checkpoint"))
        record = replace.replace_tables(model, cfg, chosen, updates, saved)
        set_options(cfg, chosen.to_keys())
        write_record(cfg, record)
    elif chosen.full_start != 1 and not stored:
        replace.scale_tables(model, chosen)
    return model


def add_optimization_args(old: Callable, parser: Any) -> Any:
    """Show the DPQ options in `fairseq-train --help`."""
    group = old(parser)
    options.add_to_parser(parser)
    return group


def setup_task(old: Callable, cfg: Any, **kwargs: Any) -> Any:
    """Check the options before anything is read."""
    stored = bool(kwargs.get("from_checkpoint"))
    if not stored:
        options.check_options(cfg)
    task = old(cfg, **kwargs)
    if stored:
        setattr(task, _FROM_CHECKPOINT, True)
    return task


def register_task(old: Callable, name: str, dataclass: Any = None) -> Callable:
    """Give a task that is registered after the plugin the DPQ options too."""
    decorate = old(name, dataclass=dataclass)

    def decorator(cls: Any) -> Any:
        cls = decorate(cls)
        options.add_to_task(name)
        return cls

    return decorator


_restoring: list[tuple[Any, bool]] = []  # the trainer that is loading, and reset_optimizer


def load_checkpoint(
    old: Callable, self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kw: Any
) -> Any:
    """Remember which trainer is loading, to compare the loaded options with its own."""
    _restoring.append((self, reset_optimizer))
    try:
        return old(self, filename, reset_optimizer, *args, **kw)
    finally:
        _restoring.pop()


def state_dict(old: Callable, self: Any) -> dict[str, Any]:
    """Mark a checkpoint with DPQ tables, so that a process without the plugin names it."""
    own = old(self)
    return own if read_record(self.cfg.model) is None else marked(own)


def forget_gone_options(state: Any) -> None:
    """Drop the flags of other versions from a checkpoint's config. fairseq 0.12.2 refuses a task
    with keys that it does not know; what its tables are is in their record."""
    known = {*options.config_keys(), RECORD_KEY, EXACT_KEY}
    for section in ("task", "model"):
        cfg = get_option(state.get("cfg"), section)
        drop_options(cfg, lambda name: name.startswith("dpq_") and name not in known)


def load_checkpoint_to_cpu(old: Callable, path: str, *args: Any, **kwargs: Any) -> Any:
    """Validate a checkpoint's DPQ tables, and compare their options with those of the
    trainer that restores it."""
    state = old(path, *args, **kwargs)
    forget_gone_options(state)
    validation.check_state(state, str(path))
    if _restoring:
        trainer, reset_optimizer = _restoring[-1]
        resume.check_restore(trainer.cfg.model, state, str(path), reset_optimizer)
    return state


def attach() -> None:
    """Hook the plugin into model building, criteria, the trainer and checkpoint loading."""
    import fairseq.models
    import fairseq.options
    import fairseq.tasks
    from fairseq import checkpoint_utils
    from fairseq.criterions import FairseqCriterion
    from fairseq.tasks import FairseqTask
    from fairseq.trainer import Trainer

    # --help is printed before a task's own options are added. Of the functions that build the
    # training parser after --user-dir is imported, this is the only one no other command uses.
    around(fairseq.options, "add_optimization_args", add_optimization_args)
    # Every task, command and checkpoint builds its model here, and looks the name up here.
    around(fairseq.models, "build_model", build_model)
    # Options are checked before dictionaries are read; tasks registered later get them too.
    around(fairseq.tasks, "setup_task", setup_task)
    around(fairseq.tasks, "register_task", register_task)
    # Stock and third-party criteria are all called as modules: criterion(model, sample).
    around(FairseqCriterion, "__call__", training.add_regularizer)
    around(FairseqTask, "optimizer_step", training.follow_update)
    around(Trainer, "_prepare_sample", training.skip_dummy_batch)
    around(Trainer, "_reduce_and_log_stats", training.log_stats)
    around(Trainer, "get_train_iterator", training.settle_schedules)
    around(Trainer, "begin_valid_epoch", training.look_before_validation)
    around(Trainer, "load_checkpoint", load_checkpoint)
    around(Trainer, "state_dict", state_dict)
    around(checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint_to_cpu)
