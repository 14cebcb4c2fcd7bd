"""Patches of how fairseq reads data: numpy names, batches, and the threads that read ahead."""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import time
import types
import warnings
import weakref
from typing import Any, Callable

from .patching import replace


def numpy_names() -> bool:
    """numpy 1.24 dropped np.int and np.float, 2.0 np.compat, 2.4 percentile(interpolation=...).

    Without it `--sample-break-mode eos`, scoring by an LM and `--num-batch-buckets` fail with
    `module 'numpy' has no attribute 'compat'`. The CRF of nacrf_transformer and span masks fail in
    the same way on `float` and `int`. The four modules that use these names get a copy of the numpy
    namespace that has them. numpy itself is unchanged, so no other code can come to rely on them.
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
    done = [replace(module, "np", lambda old: shim) for module in modules]
    return any(done)


def last_batch() -> bool:
    """Forks of fairseq's main branch drop the last batch unless its size is a multiple of 8.

    The 8 is the default of `--required-batch-size-multiple`; all splits are affected. Without it
    fairseq-generate silently translates 96 of 100 sentences and reports the BLEU of those, and a
    set of fewer than 8 sentences fails with `The dataset is empty`. With it the batches are those
    of 0.12.2.
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
    except ImportError:  # fairseq's compiled part is missing; fairseq reports that itself
        return False

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(indices, np.ndarray):
                indices = np.fromiter(indices, dtype=np.int64, count=-1)
            if len(indices) == 0:
                return []
            batches = old(indices, *args, **kwargs)
            # Batches are consecutive slices of `indices`, except with fixed shapes, where nothing
            # is dropped.
            kept = sum(len(b) for b in batches)
            return batches if kept == len(indices) else [*batches, indices[kept:]]

        return batch_by_size

    return replace(data_utils, "batch_by_size", make)


_consumers: weakref.WeakSet = weakref.WeakSet()


def _stop_consumers(seconds: float = 10.0) -> None:
    """Stop the threads that prefetch batches, and wait for them."""
    end = time.monotonic() + seconds
    for consumer in list(_consumers):
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

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def _create_consumer(self: Any) -> None:
            old(self)
            _consumers.add(self._consumer)

        return _create_consumer

    if not replace(iterators.BufferedIterator, "_create_consumer", make):
        return False
    atexit.register(_stop_consumers)
    return True
