"""Every patch of fairseq that this package makes: reason, versions, and what breaks without it.
`apply()` runs them all at import of the plugin; a patch that is not needed here does nothing.

Known to need help: fairseq 0.12.2 (the last official release) on CPU workers, and everything newer
on Python 3.11, torch >= 2.6, numpy >= 1.24. Left alone on purpose: `FairseqConfig` and
`TransformerConfig` have shared objects (0.12.2) or classes (forks for Python 3.11) as defaults, so
`TransformerConfig().encoder.embed_dim = 7` reaches every later instance. No command of fairseq
assigns to such a default; build configs with `TransformerConfig.from_namespace`.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import functools
import importlib
import inspect
import os
import sys
import time
import types
import typing
import warnings
import weakref
from typing import Any, Callable

import torch

_MARK = "_fairseq_dpq_compat"


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
    """Put `make(old)` in place of `owner.name`, once; say whether that was done now."""
    old = getattr(owner, name)
    if getattr(old, _MARK, False):
        return False
    new = make(old)
    setattr(new, _MARK, True)
    setattr(owner, name, new)
    return True


# ----------------------------------------------------------- checkpoint loading


def safe_globals() -> list[Any]:
    """What a fairseq checkpoint may hold besides tensors: the allow-list for weights_only loading.

    Entries are classes, or pairs (object, name in the file) where old files use an older name.
    `apply` adds them to torch's own list. All are plain containers: none runs code of the file's
    choosing.
    """
    import numpy as np
    import omegaconf
    from fairseq.distributed import utils as distributed_utils
    from fairseq.logging import meters

    items: list[Any] = [argparse.Namespace, collections.defaultdict, dict, list, tuple, set]
    items += [int, float, str, bool, (typing.Any, "typing.Any")]
    # Rank 0 sends its checkpoint to the other ranks as OmegaConf objects, not as plain dicts.
    items += [omegaconf.DictConfig, omegaconf.ListConfig, distributed_utils._TensorPlaceholder]
    items += [omegaconf.base.ContainerMetadata, omegaconf.base.Metadata]
    nodes = "Any", "Boolean", "Bytes", "Enum", "Float", "Integer", "Path", "String"
    items += [getattr(omegaconf, n + "Node") for n in nodes if hasattr(omegaconf, n + "Node")]
    # Meters lie in checkpoints older than fairseq 0.9, under the module's old name.
    for meter in (meters.AverageMeter, meters.StopwatchMeter, meters.TimeMeter):
        items += [meter, (meter, f"fairseq.meters.{meter.__name__}")]
    # Scores and meters are numpy scalars or small arrays now and then; numpy 1 and 2 name the
    # functions that rebuild them differently, and a file from either must load in both.
    rebuild = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        items += [(rebuild, f"{core}._reconstruct"), (scalar, f"{core}.scalar")]
    items += [np.ndarray, np.dtype]
    # From numpy 1.25 each dtype has a class of its own; before, all are numpy.dtype.
    dtypes = {type(np.dtype(t)) for t in [*"?bhilqBHILQefd", "U1", "S1"]}
    items += sorted(dtypes - {np.dtype}, key=lambda c: c.__name__)
    return items


def checkpoint_loading() -> bool:
    """torch >= 2.6 loads with weights_only=True, which refuses fairseq's own checkpoints.

    Without it generate, interactive, validate, eval-lm, hub and resume stop with `Unsupported
    global: argparse.Namespace`; with several workers resume stops on rank 1 with `Unsupported
    global: omegaconf.dictconfig.DictConfig` and rank 0 only sees a closed connection. The
    protection stays on: the classes are named one by one.
    """
    register = getattr(torch.serialization, "add_safe_globals", None)
    if register is None:  # torch < 2.4 has no allow-list and no such default
        return False
    items = safe_globals()
    if not _renames_allowed():
        items = [i for i in items if not isinstance(i, tuple)]
    known = torch.serialization.get_safe_globals()
    register([i for i in items if i not in known])
    return any(i not in known for i in items)


def _renames_allowed() -> bool:
    """torch 2.4 and 2.5 know the allow-list, but not its (object, name) pairs."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 6)


# ------------------------------------------------------------------------ numpy


def numpy_names() -> bool:
    """numpy 1.24 dropped np.int and np.float, 2.0 np.compat, 2.4 percentile(interpolation=...).

    Without it `--sample-break-mode eos`, scoring by an LM and `--num-batch-buckets` stop with
    `module 'numpy' has no attribute 'compat'`, the CRF of nacrf_transformer and span masks with the
    same for `float` and `int`. The four modules that use them get a copy of the numpy namespace
    with these names in it: numpy itself is not touched, so that nobody else comes to rely on them.
    """
    import numpy as np

    def percentile(*args: Any, interpolation: str = "linear", **kwargs: Any) -> Any:
        return np.percentile(*args, **{"method": interpolation, **kwargs})

    extra = {"compat": types.SimpleNamespace(long=int), "int": int, "float": float}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy 1.20 to 1.23 warn about the lookup
        extra = {name: value for name, value in extra.items() if not hasattr(np, name)}
    if "interpolation" not in inspect.signature(np.percentile).parameters:
        extra["percentile"] = percentile
    if not extra:
        return False
    shim = types.ModuleType("numpy", np.__doc__)
    shim.__dict__.update({**np.__dict__, **extra})
    users = "data.data_utils", "data.token_block_dataset", "data.language_pair_dataset"
    names = [f"fairseq.{user}" for user in (*users, "modules.dynamic_crf_layer")]
    modules = [importlib.import_module(name) for name in names]
    done = [_replace(module, "np", lambda old: shim) for module in modules]
    return any(done)


# ---------------------------------------------------------------------- batches


def last_batch() -> bool:
    """Forks of fairseq's main branch drop the last batch unless its size is a multiple of 8.

    The 8 is `--required-batch-size-multiple`, and it goes for every split. Without it (the patch)
    fairseq-generate translates 96 of 100 sentences and gives the BLEU of these, without a word, and
    fewer than 8 sentences are `The dataset is empty`. With it the batches are those of 0.12.2.
    """
    import numpy as np
    from fairseq.data import data_utils

    def probe() -> int:
        three = np.arange(3, dtype=np.int64)
        batches = data_utils.batch_by_size(
            three, None, num_tokens_vec=three, max_sentences=4, required_batch_size_multiple=2
        )
        return sum(len(b) for b in batches)

    try:
        if probe() == 3:
            return False
    except ImportError:  # fairseq's compiled part is missing; it says so itself when it is used
        return False

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(indices, np.ndarray):
                indices = np.fromiter(indices, dtype=np.int64, count=-1)
            if len(indices) == 0:
                return []
            batches = old(indices, *args, **kwargs)
            # Batches are consecutive pieces of `indices`, except with fixed shapes, where the
            # pieces are complete already.
            kept = sum(len(b) for b in batches)
            return batches if kept == len(indices) else [*batches, indices[kept:]]

        return batch_by_size

    return _replace(data_utils, "batch_by_size", make)


# ------------------------------------------------------------------ exit status

_consumers: weakref.WeakSet = weakref.WeakSet()


def _stop_consumers(seconds: float = 10.0) -> None:
    """Make the threads that read batches ahead end, and wait for them."""
    end = time.monotonic() + seconds
    for consumer in list(_consumers):
        consumer._max_len = 0  # ends after the batch it is at
        while consumer.is_alive() and time.monotonic() < end:
            while not consumer._queue.empty():  # it may be waiting for room
                consumer._queue.get_nowait()
            consumer.join(0.05)


def abort_at_exit() -> bool:
    """A run that ends in the middle of an epoch may be killed at its very end, all versions.

    fairseq reads batches ahead in a daemon thread. Without it, when Python shuts down while that
    thread is inside torch, the process aborts: `terminate called without an active exception`,
    return code 134, after training and saving were finished; a script with `set -e` stops there.
    Seen in 5 of 7 runs of a masked LM with `--max-update`. The threads now end before Python does.
    """
    from fairseq.data import iterators

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def _create_consumer(self: Any) -> None:
            old(self)
            _consumers.add(self._consumer)

        return _create_consumer

    if not _replace(iterators.BufferedIterator, "_create_consumer", make):
        return False
    atexit.register(_stop_consumers)
    return True


# ------------------------------------------------------------------ CPU workers


def cpu_workers() -> bool:
    """fairseq's ways to start several workers need CUDA devices, all versions.

    Without it, on CPU: plain torchrun trains independent copies that overwrite each other's
    checkpoints, rc 0 (newer forks) or asks for NCCL (0.12.2); `--distributed-world-size 2` under
    torchrun is a division by zero; a tcp:// start without `--distributed-no-spawn` starts no
    worker, trains nothing and returns 0. Now torchrun and srun work as they are, with gloo, and a
    start that cannot work says so before any data is read.
    """
    from fairseq.distributed import utils as distributed_utils

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def call_main(cfg: Any, main: Callable, **kwargs: Any) -> Any:
            from fairseq_dpq.fairseq_plugin import (
                workers,  # here, because most commands do not come by
            )

            workers.prepare(cfg)
            if cfg.distributed_training.distributed_init_method is None:
                distributed_utils.infer_init_method(cfg.distributed_training)
            workers.check_count(cfg)
            return old(cfg, main, **kwargs)

        return call_main

    return _replace(distributed_utils, "call_main", make)


def ddp_on_cpu() -> bool:
    """`--ddp-backend pytorch_ddp` (the default) hands device ids to a model on CPU, all versions.

    Without it every worker stops with `ValueError: DistributedDataParallel device_ids and
    output_device arguments only work with single-device/multiple-device GPU modules`.
    """
    from fairseq.models import distributed_fairseq_model

    def make(old: type) -> type:
        class DistributedDataParallel(old):  # type: ignore[misc, valid-type]
            def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
                if all(p.device.type == "cpu" for p in module.parameters()):
                    kwargs.update(device_ids=None, output_device=None)
                super().__init__(module, *args, **kwargs)

        return DistributedDataParallel

    return _replace(distributed_fairseq_model, "DistributedDataParallel", make)


# --------------------------------------------------------------- half precision


def bf16_without_tpu() -> bool:
    """`--bf16` on the command line means `--tpu` to fairseq, all versions.

    Without it `--bf16` and `--memory-efficient-bf16` stop with `'NoneType' object has no attribute
    'xla_device'` on CPU and GPU alike. Where torch_xla is installed nothing is changed.
    """
    from fairseq import options
    from fairseq.distributed import utils as distributed_utils

    if distributed_utils.xm is not None:
        return False

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def parse_args_and_arch(parser: Any, input_args: Any = None, *a: Any, **kw: Any) -> Any:
            parsed = old(parser, input_args, *a, **kw)
            args = parsed[0] if isinstance(parsed, tuple) else parsed
            words = sys.argv[1:] if input_args is None else input_args
            if getattr(args, "bf16", False) and "--tpu" not in words:
                args.tpu = False
            return parsed

        return parse_args_and_arch

    return _replace(options, "parse_args_and_arch", make)


def fp16_on_cpu() -> bool:
    """`--fp16` flattens the gradients on the current CUDA device, all versions.

    Without it `--fp16` on CPU stops with `Torch not compiled with CUDA enabled` (or puts the copy
    on the GPU despite `--cpu`). On CPU it now implies `--fp16-no-flatten-grads`, same numbers.
    """
    from fairseq.optim.fp16_optimizer import FP16Optimizer

    def make(old: Any) -> Any:
        @functools.wraps(old.__func__)
        def build_optimizer(cls: type, cfg: Any, params: Any, **kwargs: Any) -> Any:
            params = list(params)
            if params and params[0].device.type == "cpu":
                cfg.common.fp16_no_flatten_grads = True
            return old.__func__(cls, cfg, params, **kwargs)

        setattr(build_optimizer, _MARK, True)
        return classmethod(build_optimizer)

    return _replace(FP16Optimizer, "build_optimizer", make)


def fp16_overflow_on_cpu() -> bool:
    """When the loss scale overflows, fairseq makes a zero on the CUDA device, all versions.

    Without it the first overflow of `--fp16` on CPU stops the run with `Torch not compiled with
    CUDA enabled`, where it should halve the scale and go on. While a trainer on CPU takes a step,
    `.cuda()` leaves a tensor where it is.
    """
    import torch
    from fairseq.trainer import Trainer

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.cuda or not self.cfg.common.fp16:
                return old(self, *args, **kwargs)
            before = torch.Tensor.cuda
            torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
            try:
                return old(self, *args, **kwargs)
            finally:
                torch.Tensor.cuda = before  # type: ignore[method-assign]

        return train_step

    return _replace(Trainer, "train_step", make)


# --------------------------------------------------------------------- warnings

# (start of the message, category, module it is blamed on). Only what fairseq's user cannot act on.
# A message that names the user's own flags or files does not belong here.
_NOISE: tuple[tuple[str, type, str], ...] = (
    (r"hydra\.experimental\.\w+\(\) is no longer experimental", UserWarning, r"hydra\."),
    (r"\s*The version_base parameter is not specified", UserWarning, r"hydra\."),
    (r"In '.*': Usage of deprecated keyword in package header", UserWarning, r"hydra\."),
    # Blamed on a frame far above hydra: the user's script, or nothing at all.
    (r"\s*'config' is validated against ConfigStore schema", UserWarning, ""),
    (r"\s*The strict flag in the compose API is deprecated", UserWarning, r"hydra\."),
    (
        r"'pin_memory' argument is set as true but no accelerator",
        UserWarning,
        r"torch\.utils\.data",
    ),
    # fairseq hands DistributedDataParallel its own --broadcast-buffers
    (r"`broadcast_buffers` is deprecated", FutureWarning, r"fairseq"),
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", FutureWarning, r"(fairseq|torch)"),
    (r"Support for mismatched key_padding_mask and", UserWarning, r"torch\.nn"),
    (r"`torch\.nn\.utils\.weight_norm` is deprecated", FutureWarning, r"torch\.nn"),
    (r"Using non-full backward hooks on a Module that does not", Warning, r"torch\.nn"),
    # torch < 2: at every start on CPU, whatever the precision.
    (r"User provided device_type of 'cuda', but CUDA is not available", UserWarning, r"torch\."),
)


def warning_noise() -> bool:
    """hydra >= 1.1 and torch >= 2 warn of fairseq's code some ten times per run.

    Nothing breaks without it, but warnings that matter drown. Each one is matched by message and by
    the module it is blamed on; the same message from the user's own code still shows.
    """
    before = len(warnings.filters)
    for message, category, module in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    return len(warnings.filters) > before


# --------------------------------------------------------------------- user-dir


def user_dir_again() -> bool:
    """`--user-dir fairseq_dpq` fails where this package was imported before, all versions.

    fairseq compares paths letter by letter: `.../fairseq/../fairseq_dpq`, a link or the checkout's
    own path are `not globally unique` to it. Without it a program or command that imports this
    package first could not be given the flag any more.
    """
    from fairseq import utils

    package = os.path.dirname(os.path.abspath(__file__))
    beside = os.path.dirname(os.path.abspath(utils.__file__))

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def import_user_module(args: Any) -> None:
            name = getattr(args, "user_dir", None)
            if name is not None:
                places = [os.path.abspath(name), os.path.join(beside, name)]
                places.append(os.path.join(beside, "..", name))
                found = next((place for place in places if os.path.exists(place)), None)
                if found is not None and os.path.samefile(found, package):
                    return
            old(args)

        return import_user_module

    return _replace(utils, "import_user_module", make)


# ------------------------------------------------------------------ the plugin's own hooks
#
# Where DPQ enters fairseq, all versions. Without them the options exist but nothing is replaced.


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

    # --help answers before a task's own options are added; of the functions that make up the
    # training parser after --user-dir is imported, this one serves no other command.
    _replace(fairseq.options, "add_optimization_args", hooks.add_optimization_args)
    # Every task, command and checkpoint builds its model here, and looks the name up here.
    _replace(fairseq.models, "build_model", hooks.build_model)
    # Options are checked before dictionaries are read; tasks registered later get them too.
    _replace(fairseq.tasks, "setup_task", hooks.setup_task)
    _replace(fairseq.tasks, "register_task", hooks.register_task)
    # Stock and foreign criteria alike are called as modules: criterion(model, sample).
    _replace(FairseqCriterion, "__call__", hooks.criterion_call)
    _replace(FairseqTask, "optimizer_step", hooks.optimizer_step)
    _replace(Trainer, "_prepare_sample", hooks.prepare_sample)
    _replace(Trainer, "_reduce_and_log_stats", hooks.reduce_and_log_stats)
    _replace(Trainer, "begin_valid_epoch", hooks.begin_valid_epoch)
    _replace(Trainer, "load_checkpoint", hooks.load_checkpoint)
    _replace(checkpoint_utils, "load_checkpoint_to_cpu", hooks.load_checkpoint_to_cpu)


# -------------------------------------------------------------------------- all

PATCHES: tuple[Callable[[], bool], ...] = (
    checkpoint_loading,
    numpy_names,
    last_batch,
    abort_at_exit,
    cpu_workers,
    ddp_on_cpu,
    bf16_without_tpu,
    fp16_on_cpu,
    fp16_overflow_on_cpu,
    user_dir_again,
    warning_noise,
)


def apply() -> list[str]:
    """Run every patch that this installation needs; return the names of those that did something.

    May be called again at any time: what is in place stays, and the list is then empty.
    """
    return [patch.__name__ for patch in PATCHES if patch()]
