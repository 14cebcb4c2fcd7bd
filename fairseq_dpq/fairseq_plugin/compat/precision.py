"""Patches of half precision in fairseq: bf16 without a TPU, fp16 on CPU."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

from .patching import MARK, replace


def bf16_without_tpu() -> bool:
    """fairseq takes `--bf16` on the command line to imply `--tpu`, all versions.

    Without it `--bf16` and `--memory-efficient-bf16` fail with `'NoneType' object has no attribute
    'xla_device'` on CPU and GPU. Nothing is changed if torch_xla is installed.
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

    return replace(options, "parse_args_and_arch", make)


def fp16_on_cpu() -> bool:
    """`--fp16` flattens the gradients on the current CUDA device, all versions.

    Without it `--fp16` on CPU fails with `Torch not compiled with CUDA enabled`, or puts the copy
    on the GPU despite `--cpu`. With it, `--fp16` on CPU implies `--fp16-no-flatten-grads`, which
    gives the same numbers.
    """
    from fairseq.optim.fp16_optimizer import FP16Optimizer

    def make(old: Any) -> Any:
        @functools.wraps(old.__func__)
        def build_optimizer(cls: type, cfg: Any, params: Any, **kwargs: Any) -> Any:
            params = list(params)
            if params and params[0].device.type == "cpu":
                cfg.common.fp16_no_flatten_grads = True
            return old.__func__(cls, cfg, params, **kwargs)

        setattr(build_optimizer, MARK, True)
        return classmethod(build_optimizer)

    return replace(FP16Optimizer, "build_optimizer", make)


def fp16_overflow_on_cpu() -> bool:
    """When the loss scale overflows, fairseq creates a zero on the CUDA device, all versions.

    Without it the first overflow of `--fp16` on CPU ends the run with `Torch not compiled with CUDA
    enabled` instead of halving the scale. With it, `.cuda()` does nothing while a trainer on CPU
    takes a step.
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

    return replace(Trainer, "train_step", make)
