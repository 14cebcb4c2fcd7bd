"""What DPQ does inside fairseq's own functions, and where: `attach` installs the hooks.

Each gets the function that it stands for as `old`, then that function's arguments. With DPQ off,
they all behave as fairseq does. Without them the options exist, but no table is replaced.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin import options, replace, resume, training, validation
from fairseq_dpq.fairseq_plugin.configs import (
    delete_options,
    get_option,
    read_record,
    run_option,
    set_options,
    write_record,
)
from fairseq_dpq.fairseq_plugin.patching import around
from fairseq_dpq.files.record import EXACT_KEY, RECORD_KEY
from fairseq_dpq.marker import marked

_ABSENT = object()
_FROM_CHECKPOINT = "_dpq_from_checkpoint"  # marks a task that was built from a checkpoint's config


def build_model(
    old: Callable, cfg: Any, task: Any, from_checkpoint: bool = False, **kwargs: Any
) -> Any:
    """Build the stock model, then replace its tables."""
    # fairseq refuses keys that a model's dataclass does not have, or drops them in place.
    ours = [*options.config_keys(), RECORD_KEY, EXACT_KEY]
    present = [k for k in ours if get_option(cfg, k, _ABSENT) is not _ABSENT]
    kept = {k: get_option(cfg, k) for k in present}
    record = read_record(cfg)
    delete_options(cfg, list(kept))
    try:
        model = old(cfg, task, from_checkpoint, **kwargs)
    finally:
        set_options(cfg, kept)
    if record is not None:
        replace.restore_tables(model, record, bool(get_option(cfg, EXACT_KEY)))
        return model
    # A checkpoint has its own options: in an ensemble the task may be that of another one.
    stored = from_checkpoint or getattr(task, _FROM_CHECKPOINT, False)
    own = stored or options.has_options(cfg)
    chosen = options.read_options(cfg if own else _task_options(task))
    if chosen.enabled:
        _refuse_sharding(cfg)
        option = functools.partial(run_option, cfg, "checkpoint")
        use = training.first_guess(cfg), resume.starts_trained(option)
        record = replace.replace_tables(model, cfg, chosen, *use, saved=resume.saved(option))
        set_options(cfg, chosen.to_keys())
        write_record(cfg, record)
    elif chosen.full_start != 1 and not stored:
        replace.scale_tables(model, chosen)
    return model


def _refuse_sharding(cfg: Any) -> None:
    if run_option(cfg, "distributed_training", "ddp_backend") == "fully_sharded":
        raise DPQConfigError(
            "--ddp-backend fully_sharded: it keeps only a part of each DPQ table on a worker, and "
            "statistics need the whole; use pytorch_ddp or legacy_ddp"
        )


def _task_options(task: Any) -> Any:
    # Older tasks have args instead of cfg.
    return getattr(task, "cfg", None) or getattr(task, "args", None)


def add_optimization_args(old: Callable, parser: Any) -> Any:
    """Show the DPQ options in `fairseq-train --help`."""
    group = old(parser)
    options.add_to_parser(parser)
    return group


def setup_task(old: Callable, cfg: Any, **kwargs: Any) -> Any:
    """Check the options before anything is read."""
    if not kwargs.get("from_checkpoint"):
        options.check_options(cfg)
    task = old(cfg, **kwargs)
    if kwargs.get("from_checkpoint"):
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


_depth = 0  # a criterion may call others; the outermost one adds the regulariser


def criterion_call(old: Callable, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the regulariser to what any criterion returns, once for each batch."""
    global _depth
    if not _depth and not getattr(model, "training", True):
        training.forget_batch(model)  # of passes outside the criterion, e.g. of --eval-bleu
    _depth += 1
    try:
        result = old(self, model, *args, **kwargs)
    except BaseException:  # out of memory, say: the trainer may go on with the next batch
        training.forget_batch(model)
        raise
    finally:
        _depth -= 1
    return result if _depth else training.add_regularizer(model, result)


def optimizer_step(old: Callable, self: Any, optimizer: Any, model: Any, update_num: int) -> None:
    """Update the tables' statistics after each update."""
    old(self, optimizer, model, update_num)
    training.after_update(model, optimizer)


def prepare_sample(old: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the dummy batch of a worker that has run out of data out of the statistics."""
    sample, is_dummy = old(self, *args, **kwargs)
    for _, table in training.named_tables(self.model):
        table.ignore_batch = bool(is_dummy)
    return sample, is_dummy


def reduce_and_log_stats(
    old: Callable, self: Any, logging_outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Log the regulariser with each batch, and code use every so many updates."""
    training.log_regularizer(logging_outputs)
    watch = training.watch_of(self)
    if self.model.training and watch.every and self.get_num_updates() % watch.every == 0:
        watch.look(self)
    watch.log()
    return old(self, logging_outputs, *args, **kwargs)


def begin_valid_epoch(old: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Measure code use before each validation."""
    training.watch_of(self).look(self)
    return old(self, *args, **kwargs)


def get_train_iterator(old: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Settle the warm-up as soon as the length of an epoch is known."""
    batches = old(self, *args, **kwargs)
    training.settle_schedules(self, batches)
    return batches


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


def load_checkpoint_to_cpu(old: Callable, path: str, *args: Any, **kwargs: Any) -> Any:
    """Validate a checkpoint's DPQ tables, and compare their options with those of the
    trainer that restores it."""
    state = old(path, *args, **kwargs)
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
    around(FairseqCriterion, "__call__", criterion_call)
    around(FairseqTask, "optimizer_step", optimizer_step)
    around(Trainer, "_prepare_sample", prepare_sample)
    around(Trainer, "_reduce_and_log_stats", reduce_and_log_stats)
    around(Trainer, "get_train_iterator", get_train_iterator)
    around(Trainer, "begin_valid_epoch", begin_valid_epoch)
    around(Trainer, "load_checkpoint", load_checkpoint)
    around(Trainer, "state_dict", state_dict)
    around(checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint_to_cpu)
