"""Patches of how fairseq starts workers on CPU."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from .patching import replace


def cpu_workers() -> bool:
    """fairseq can only start several workers on CUDA devices, all versions.

    Without it, on CPU: plain torchrun trains independent copies that overwrite each other's
    checkpoints and exits with 0 (newer forks), or asks for NCCL (0.12.2);
    `--distributed-world-size 2` under torchrun divides by zero; a tcp:// launch without
    `--distributed-no-spawn` starts no worker, trains nothing and exits with 0. With it, torchrun
    and srun work on CPU with gloo, and invalid launches fail before any data is read.
    """
    from fairseq.distributed import utils as distributed_utils

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def call_main(cfg: Any, main: Callable, **kwargs: Any) -> Any:
            # Imported here because most commands never get to this point.
            from fairseq_dpq.fairseq_plugin import workers

            workers.prepare(cfg)
            if cfg.distributed_training.distributed_init_method is None:
                distributed_utils.infer_init_method(cfg.distributed_training)
            workers.check_count(cfg)
            result = old(cfg, main, **kwargs)
            workers.leave()
            return result

        return call_main

    return replace(distributed_utils, "call_main", make)


def ddp_on_cpu() -> bool:
    """`--ddp-backend pytorch_ddp` (the default) passes device ids for a model on CPU, all versions.

    Without it every worker fails with `ValueError: DistributedDataParallel device_ids and
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

    return replace(distributed_fairseq_model, "DistributedDataParallel", make)
