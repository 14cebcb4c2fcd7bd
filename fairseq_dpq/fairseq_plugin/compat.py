"""Every patch of fairseq that this package makes: reason, versions, and what breaks without it.
`apply()` runs them all when the plugin is imported. A patch that is not needed does nothing.

Patches are needed by fairseq 0.12.2 (the last official release) with workers on CPU, and by every
version on Python 3.11, torch >= 2.6 or numpy >= 1.24. One fault is deliberately left alone:
`FairseqConfig` and `TransformerConfig` have shared objects (0.12.2) or classes (forks for Python
3.11) as defaults, so `TransformerConfig().encoder.embed_dim = 7` changes every later instance. No
fairseq command assigns to such a default. Build configs with `TransformerConfig.from_namespace`.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
import threading
import time
import types
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable

import torch

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.patching import around, replace
from fairseq_dpq.fairseq_plugin.saving import checkpoint_files
from fairseq_dpq.fairseq_plugin.workers import cpu_workers, ddp_on_cpu
from fairseq_dpq.marker import plain_globals

# Checkpoints --------------------------------------------------------------------------------------


def safe_globals() -> list[Any]:
    """What a fairseq checkpoint may hold besides tensors: the allow-list for weights_only loading.

    Entries are classes, or pairs (object, name in the file) where old files use an older name.
    `apply` adds them to torch's own list. All are plain containers: none can run code from the
    file.
    """
    import omegaconf
    from fairseq.distributed import utils as distributed_utils
    from fairseq.logging import meters

    items = plain_globals()
    # Rank 0 sends its checkpoint to the other ranks as OmegaConf objects, not as plain dicts.
    items += [omegaconf.DictConfig, omegaconf.ListConfig, distributed_utils._TensorPlaceholder]
    items += [omegaconf.base.ContainerMetadata, omegaconf.base.Metadata]
    nodes = "Any", "Boolean", "Bytes", "Enum", "Float", "Integer", "Path", "String"
    items += [getattr(omegaconf, n + "Node") for n in nodes if hasattr(omegaconf, n + "Node")]
    # Checkpoints older than fairseq 0.9 contain meters, under the module's old name.
    for meter in (meters.AverageMeter, meters.StopwatchMeter, meters.TimeMeter):
        items += [meter, (meter, f"fairseq.meters.{meter.__name__}")]
    return items


def checkpoint_loading() -> bool:
    """torch >= 2.6 loads with weights_only=True, which refuses fairseq's own checkpoints.

    Without it generate, interactive, validate, eval-lm, hub and resume fail with `Unsupported
    global: argparse.Namespace`. With several workers, resuming fails on rank 1 with `Unsupported
    global: omegaconf.dictconfig.DictConfig`, and rank 0 only sees a closed connection. The
    protection stays on: each class is allowed by name.
    """
    register = getattr(torch.serialization, "add_safe_globals", None)
    if register is None:  # torch 1 has neither the allow-list nor that default
        return False
    known = torch.serialization.get_safe_globals()
    missing = [item for item in safe_globals() if item not in known]
    register(missing)
    return bool(missing)


# Data ---------------------------------------------------------------------------------------------


def numpy_names() -> bool:
    """numpy 2 has neither np.int, np.float and np.compat nor percentile(interpolation=...).

    Without it `--sample-break-mode eos`, scoring by an LM and `--num-batch-buckets` fail with
    `module 'numpy' has no attribute 'compat'`. The CRF of nacrf_transformer and span masks fail in
    the same way on `float` and `int`. The four modules that use these names get a copy of the numpy
    namespace that has them. numpy itself is unchanged, so no other code can come to rely on them.
    """
    import numpy as np

    if hasattr(np, "int"):  # numpy before 1.24
        return False

    def percentile(*args: Any, interpolation: str = "linear", **kwargs: Any) -> Any:
        return np.percentile(*args, **{"method": interpolation, **kwargs})

    extra = {"compat": types.SimpleNamespace(long=int), "int": int, "float": float}
    extra["percentile"] = percentile
    shim = types.ModuleType("numpy", np.__doc__)
    shim.__dict__.update({**np.__dict__, **extra})
    users = "data.data_utils", "data.token_block_dataset", "data.language_pair_dataset"
    names = [f"fairseq.{user}" for user in (*users, "modules.dynamic_crf_layer")]
    done = [replace(importlib.import_module(name), "np", lambda old: shim) for name in names]
    return any(done)


def last_batch() -> bool:
    """Forks of fairseq's main branch drop the last batch unless its size is a multiple of 8.

    The 8 is the default of `--required-batch-size-multiple`; all splits are affected. Without it
    fairseq-generate silently translates 96 of 100 sentences and reports the BLEU of those, and a
    set of fewer than 8 sentences fails with `The dataset is empty`. With it the batches are those
    of 0.12.2, which drops nothing.
    """
    import numpy as np
    from fairseq.data import data_utils

    def batch_by_size(old: Callable, indices: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = old(indices, *args, **kwargs)
        # Batches are consecutive slices of `indices`, except with fixed shapes, where nothing is
        # dropped.
        kept = sum(len(b) for b in batches)
        return batches if kept == len(indices) else [*batches, indices[kept:]]

    return around(data_utils, "batch_by_size", batch_by_size)


def _stop_consumers(kind: type, seconds: float = 10.0) -> None:
    """Stop the threads that prefetch batches, and wait for them."""
    end = time.monotonic() + seconds
    consumers: list[Any] = [t for t in threading.enumerate() if isinstance(t, kind)]
    for consumer in consumers:
        consumer._max_len = 0  # ends after its current batch
        while consumer.is_alive() and time.monotonic() < end:
            while not consumer._queue.empty():  # it may be blocked on a full queue
                consumer._queue.get_nowait()
            consumer.join(0.05)


def abort_at_exit() -> bool:
    """A run that ends in the middle of an epoch may abort when it exits, all versions.

    fairseq prefetches batches in a daemon thread. Without it, if Python shuts down while that
    thread is inside torch, the process aborts: `terminate called without an active exception`,
    exit code 134, after training and saving have finished. A script with `set -e` stops there.
    Seen in 5 of 7 runs of a masked LM with `--max-update`. The threads now end before Python does.
    """
    from fairseq.data import iterators

    def make(consumer: type) -> type:
        atexit.register(_stop_consumers, consumer)
        return consumer

    return replace(iterators, "BackgroundConsumer", make)


# Half precision -----------------------------------------------------------------------------------


def bf16_without_tpu() -> bool:
    """fairseq takes `--bf16` on the command line to imply `--tpu`, all versions.

    Without it `--bf16` and `--memory-efficient-bf16` fail with `'NoneType' object has no attribute
    'xla_device'` on CPU and GPU. Nothing is changed if torch_xla is installed.
    """
    from fairseq import options
    from fairseq.distributed import utils as distributed_utils

    if distributed_utils.xm is not None:
        return False

    def parse(old: Callable, parser: Any, input_args: Any = None, *a: Any, **kw: Any) -> Any:
        parsed = old(parser, input_args, *a, **kw)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        words = sys.argv[1:] if input_args is None else input_args
        if getattr(args, "bf16", False) and "--tpu" not in words:
            args.tpu = False
        return parsed

    return around(options, "parse_args_and_arch", parse)


def fp16_on_cpu() -> bool:
    """`--fp16` flattens the gradients on the current CUDA device, all versions.

    Without it `--fp16` on CPU fails with `Torch not compiled with CUDA enabled`, or puts the copy
    on the GPU despite `--cpu`; and the first time that the loss scale overflows, fairseq creates a
    zero on that device instead of halving the scale. With it, `--fp16` on CPU implies
    `--fp16-no-flatten-grads`, which gives the same numbers, and `.cuda()` does nothing while a
    trainer on CPU takes a step.
    """
    from fairseq.trainer import Trainer

    def build_optimizer(old: Callable, self: Any) -> None:
        if self.device.type == "cpu":
            self.cfg.common.fp16_no_flatten_grads = True
        old(self)

    def train_step(old: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.cuda or not self.cfg.common.fp16:
            return old(self, *args, **kwargs)
        before = torch.Tensor.cuda
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
        try:
            return old(self, *args, **kwargs)
        finally:
            torch.Tensor.cuda = before  # type: ignore[method-assign]

    around(Trainer, "_build_optimizer", build_optimizer)
    return around(Trainer, "train_step", train_step)


# Starting -----------------------------------------------------------------------------------------


# (start of the message, category, module it is attributed to). Only warnings that a fairseq user
# cannot act on: a message that names the user's flags or files does not belong here.
_NOISE: tuple[tuple[str, type, str], ...] = (
    (r"hydra\.experimental\.\w+\(\) is no longer experimental", UserWarning, r"hydra\."),
    (r"\s*The version_base parameter is not specified", UserWarning, r"(hydra|fairseq_cli)\."),
    (r"In '.*': Usage of deprecated keyword in package header", UserWarning, r"hydra\."),
    # Attributed to a frame far above hydra: the user's script, or nothing at all.
    (r"\s*'config' is validated against ConfigStore schema", UserWarning, ""),
    (r"\s*The strict flag in the compose API is deprecated", UserWarning, r"hydra\."),
    (r"'pin_memory' argument is set as true but no accelerator", UserWarning, r"torch\.utils"),
    # fairseq passes its own --broadcast-buffers to DistributedDataParallel
    (r"`broadcast_buffers` is deprecated", FutureWarning, r"fairseq"),
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", FutureWarning, r"(fairseq|torch)"),
    (r"Support for mismatched key_padding_mask and", UserWarning, r"torch\.nn"),
    (r"`torch\.nn\.utils\.weight_norm` is deprecated", FutureWarning, r"torch\.nn"),
    (r"Using non-full backward hooks on a Module that does not", Warning, r"torch\.nn"),
    # torch < 2: at every start on CPU, whatever the precision.
    (r"User provided device_type of 'cuda', but CUDA is not available", UserWarning, r"torch\."),
)


def warning_noise() -> bool:
    """hydra >= 1.1 and torch >= 2 warn about fairseq's code about ten times per run.

    Nothing breaks without it, but the noise hides warnings that matter. Each warning is matched by
    its message and the module it is attributed to. The same message from the user's code is shown.
    """
    before = len(warnings.filters)
    for message, category, module in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    return len(warnings.filters) > before


def user_dir_again() -> bool:
    """`--user-dir fairseq_dpq` fails if this package is already imported, all versions.

    fairseq compares paths as strings, so it rejects `.../fairseq/../fairseq_dpq`, a symbolic link
    or the checkout's own path as `not globally unique`. Without it, a program or command that
    imports this package first cannot use the flag. The name of any other package that Python can
    import works too, and a name that nothing has is an error of one line.
    """
    from fairseq import utils

    package = Path(__file__).resolve().parents[1]  # fairseq_dpq, not this folder
    beside = os.path.dirname(os.path.abspath(utils.__file__))

    def import_user_module(old: Callable, args: Any) -> None:
        name = getattr(args, "user_dir", None)
        if name is not None:
            folders = [os.path.join(start, name) for start in (os.getcwd(), beside, f"{beside}/..")]
            found = next(filter(os.path.exists, folders), None)
            if found is None and name.isidentifier():
                spec = importlib.util.find_spec(name)
                found = next(iter(spec.submodule_search_locations or []), None) if spec else None
            if found is None:
                raise DPQConfigError(
                    f"--user-dir {name}: there is no such folder here or beside fairseq, and no "
                    f"Python package of that name; the plugin is fairseq_dpq, in {package}"
                )
            if os.path.samefile(found, package):
                return
            args = Namespace(user_dir=found)
        old(args)

    return around(utils, "import_user_module", import_user_module)


# --------------------------------------------------------------------------------------------------

PATCHES: tuple[Callable[[], bool], ...] = (
    checkpoint_loading,
    checkpoint_files,
    numpy_names,
    last_batch,
    abort_at_exit,
    cpu_workers,
    ddp_on_cpu,
    bf16_without_tpu,
    fp16_on_cpu,
    user_dir_again,
    warning_noise,
)


def apply() -> list[str]:
    """Run every patch that this installation needs; return the names of those that had an effect.

    Safe to call again: patches stay in place, and the list is then empty.
    """
    return [patch.__name__ for patch in PATCHES if patch()]
