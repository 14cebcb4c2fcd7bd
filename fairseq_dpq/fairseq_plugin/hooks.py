"""What each hook does; `compat.attach` installs them.

Each takes fairseq's function and returns its replacement. With DPQ off, they all behave as
fairseq does.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin import (
    options,
    replace,
    resume,
    schedule,
    tensorboard,
    training,
    validation,
)
from fairseq_dpq.fairseq_plugin.configs import (
    delete_options,
    get_option,
    read_record,
    run_option,
    set_options,
    write_record,
)
from fairseq_dpq.files.record import EXACT_KEY, RECORD_KEY
from fairseq_dpq.marker import marked

_ABSENT = object()
_FROM_CHECKPOINT = "_dpq_from_checkpoint"  # marks a task that was built from a checkpoint's config


def build_model(old: Callable) -> Callable:
    """Build the stock model, then replace its tables."""

    @functools.wraps(old)
    def build(cfg: Any, task: Any, from_checkpoint: bool = False, **kwargs: Any) -> Any:
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
            use = schedule.first_guess(cfg), resume.starts_trained(option)
            record = replace.replace_tables(model, cfg, chosen, *use, saved=resume.saved(option))
            set_options(cfg, chosen.to_keys())
            write_record(cfg, record)
        elif chosen.full_start != 1 and not stored:
            replace.scale_tables(model, chosen)
        return model

    return build


def _refuse_sharding(cfg: Any) -> None:
    if run_option(cfg, "distributed_training", "ddp_backend") == "fully_sharded":
        raise DPQConfigError(
            "--ddp-backend fully_sharded: it keeps only a part of each DPQ table on a worker, and "
            "statistics need the whole; use pytorch_ddp or legacy_ddp"
        )


def _task_options(task: Any) -> Any:
    # Older tasks have args instead of cfg.
    return getattr(task, "cfg", None) or getattr(task, "args", None)


def add_optimization_args(old: Callable) -> Callable:
    """Show the DPQ options in `fairseq-train --help`."""

    @functools.wraps(old)
    def add(parser: Any) -> Any:
        group = old(parser)
        options.add_to_parser(parser)
        return group

    return add


def setup_task(old: Callable) -> Callable:
    """Check the options before anything is read."""

    @functools.wraps(old)
    def setup(cfg: Any, **kwargs: Any) -> Any:
        if not kwargs.get("from_checkpoint"):
            options.check_options(cfg)
        task = old(cfg, **kwargs)
        if kwargs.get("from_checkpoint"):
            setattr(task, _FROM_CHECKPOINT, True)
        return task

    return setup


def register_task(old: Callable) -> Callable:
    """Give a task that is registered after the plugin the DPQ options too."""

    @functools.wraps(old)
    def register(name: str, dataclass: Any = None) -> Callable:
        decorate = old(name, dataclass=dataclass)

        def decorator(cls: Any) -> Any:
            cls = decorate(cls)
            options.add_to_task(name)
            return cls

        return decorator

    return register


def criterion_call(old: Callable) -> Callable:
    """Add the regulariser to what any criterion returns, once for each batch."""
    depth = 0  # a criterion may call others; the outermost one adds it

    def call(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth:
            training.forget_evaluation(model)
        depth += 1
        try:
            result = old(self, model, *args, **kwargs)
        except BaseException:  # out of memory, say: the trainer may go on with the next batch
            training.forget_batch(model)
            raise
        finally:
            depth -= 1
        return result if depth else training.add_regularizer(model, result)

    return call


def optimizer_step(old: Callable) -> Callable:
    """Update the tables' statistics after each update."""

    @functools.wraps(old)
    def step(self: Any, optimizer: Any, model: Any, update_num: int) -> None:
        old(self, optimizer, model, update_num)
        training.after_update(model, optimizer)

    return step


def prepare_sample(old: Callable) -> Callable:
    """Keep the dummy batch of a worker that has run out of data out of the statistics."""

    @functools.wraps(old)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        sample, is_dummy = old(self, *args, **kwargs)
        for _, table in training.named_tables(self.model):
            table.ignore_batch = bool(is_dummy)
        return sample, is_dummy

    return prepare


def reduce_and_log_stats(old: Callable) -> Callable:
    """Log the regulariser with each batch, and code use every so many updates."""

    @functools.wraps(old)
    def reduce(self: Any, logging_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        training.log_regularizer(logging_outputs)
        if not hasattr(self, "_dpq_interval"):
            self._dpq_interval = options.read_options(self.cfg.model).log_interval
        every = self._dpq_interval
        if self.model.training and every and self.get_num_updates() % every == 0:
            _look(self)
        if hasattr(self, "_dpq_watch"):
            self._dpq_watch.log()
        return old(self, logging_outputs, *args, **kwargs)

    return reduce


def _look(trainer: Any) -> None:
    """Measure code use, unless it has been measured after this update."""
    if not hasattr(trainer, "_dpq_watch"):
        trainer._dpq_watch = training.CodeWatch()
    model, updates = trainer.get_model(), trainer.get_num_updates()
    trainer._dpq_watch.look(model, updates, tensorboard.writer(trainer.cfg))


def begin_valid_epoch(old: Callable) -> Callable:
    """Measure code use before each validation."""

    @functools.wraps(old)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _look(self)
        return old(self, *args, **kwargs)

    return begin


def get_train_iterator(old: Callable) -> Callable:
    """Settle the warm-up as soon as the length of an epoch is known."""

    @functools.wraps(old)
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches = old(self, *args, **kwargs)
        schedule.settle(self, batches)
        return batches

    return get


_restoring: list[tuple[Any, bool]] = []  # the trainer that is loading, and reset_optimizer


def load_checkpoint(old: Callable) -> Callable:
    """Remember which trainer is loading, to compare the loaded options with its own."""

    @functools.wraps(old)
    def load(self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kw: Any) -> Any:
        _restoring.append((self, reset_optimizer))
        try:
            return old(self, filename, reset_optimizer, *args, **kw)
        finally:
            _restoring.pop()

    return load


def state_dict(old: Callable) -> Callable:
    """Mark a checkpoint with DPQ tables, so that a process without the plugin names it."""

    @functools.wraps(old)
    def state(self: Any) -> dict[str, Any]:
        own = old(self)
        return own if read_record(self.cfg.model) is None else marked(own)

    return state


def load_checkpoint_to_cpu(old: Callable) -> Callable:
    """Validate a checkpoint's DPQ tables, and compare their options with those of the
    trainer that restores it."""

    @functools.wraps(old)
    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        state = old(path, *args, **kwargs)
        validation.check_state(state, str(path))
        if _restoring:
            trainer, reset_optimizer = _restoring[-1]
            resume.check_restore(trainer.cfg.model, state, str(path), reset_optimizer)
        return state

    return load
