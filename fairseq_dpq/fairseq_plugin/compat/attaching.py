"""Where DPQ enters fairseq, all versions. Without these hooks the options exist, but no table is
replaced."""

from __future__ import annotations

from .patching import replace


def attach() -> None:
    """Hook the plugin into model building, criteria, the trainer and checkpoint loading."""
    import fairseq.models
    import fairseq.options
    import fairseq.tasks
    from fairseq import checkpoint_utils
    from fairseq.criterions import FairseqCriterion
    from fairseq.tasks import FairseqTask
    from fairseq.trainer import Trainer

    from fairseq_dpq.fairseq_plugin import hooks

    # --help is printed before a task's own options are added. Of the functions that build the
    # training parser after --user-dir is imported, this is the only one no other command uses.
    replace(fairseq.options, "add_optimization_args", hooks.add_optimization_args)
    # Every task, command and checkpoint builds its model here, and looks the name up here.
    replace(fairseq.models, "build_model", hooks.build_model)
    # Options are checked before dictionaries are read; tasks registered later get them too.
    replace(fairseq.tasks, "setup_task", hooks.setup_task)
    replace(fairseq.tasks, "register_task", hooks.register_task)
    # Stock and third-party criteria are all called as modules: criterion(model, sample).
    replace(FairseqCriterion, "__call__", hooks.criterion_call)
    replace(FairseqTask, "optimizer_step", hooks.optimizer_step)
    replace(Trainer, "_prepare_sample", hooks.prepare_sample)
    replace(Trainer, "_reduce_and_log_stats", hooks.reduce_and_log_stats)
    replace(Trainer, "get_train_iterator", hooks.get_train_iterator)
    replace(Trainer, "begin_valid_epoch", hooks.begin_valid_epoch)
    replace(Trainer, "load_checkpoint", hooks.load_checkpoint)
    replace(Trainer, "state_dict", hooks.state_dict)
    replace(checkpoint_utils, "load_checkpoint_to_cpu", hooks.load_checkpoint_to_cpu)
