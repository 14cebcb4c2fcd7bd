"""Optimisers and learning-rate schedule of the paper that fairseq lacks: `--optimizer sm3`,
`--optimizer lazy_adam` and `--lr-scheduler quadratic_warmup`.

`SM3` and `LazyAdam` are plain torch optimisers; `FairseqSM3` and `FairseqLazyAdam` are their forms
inside fairseq. Both take dense gradients, and keep their state in float32 for parameters of any
dtype.
"""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II
from torch import Tensor

_TINY = 1e-30  # SM3 divides 0 by 0 where a gradient has always been zero, and calls that 0


class DenseOptimizer(torch.optim.Optimizer):
    """Calls `update` for each parameter that has a gradient."""

    # Read by fairseq. float16 parameters are updated through float32, and a model flattened into
    # one vector would have neither rows nor slices.
    supports_memory_efficient_fp16 = True
    supports_flat_params = False

    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], float]] = None
    ) -> Optional[float]:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} only takes dense gradients; build embeddings with "
                        "sparse=False"
                    )
                with torch.no_grad():
                    self.update(p, p.grad, group)
        return loss

    def update(self, p: Tensor, grad: Tensor, group: Dict[str, Any]) -> None:
        """Move one parameter."""
        raise NotImplementedError

    def kept(self, p: Tensor, name: str, shape: Optional[Sequence[int]] = None) -> Tensor:
        """A tensor of a parameter's state; zeros at first, of the parameter's shape."""
        tensor = self.state[p].get(name)
        if tensor is None:
            tensor = torch.zeros(p.shape if shape is None else shape)
        # fairseq's memory-efficient fp16 puts the checkpoint's own (CPU) tensors back on resume.
        self.state[p][name] = tensor = tensor.to(device=p.device, dtype=torch.float32)
        return tensor


class FairseqDense(FairseqOptimizer):
    """One of them inside fairseq. With `--fp16`, pass `--fp16-no-flatten-grads` or use
    `--memory-efficient-fp16`: a flattened model has neither rows nor slices."""

    kind: Type[DenseOptimizer]

    def __init__(self, cfg: Any, params: Iterable[Any]) -> None:
        super().__init__(cfg)
        self._optimizer = self.kind(params, **self.optimizer_config)

    def config(self, **settings: Any) -> Dict[str, Any]:
        """Settings beside the learning rate, which override a checkpoint's on resume."""
        lr = self.cfg.lr
        return {"lr": float(lr if isinstance(lr, (int, float)) else lr[0]), **settings}


class SM3(DenseOptimizer):
    """SM3-II (Anil et al., 2019, arXiv 1901.11150). A (m, n) matrix keeps m + n accumulators in
    place of Adagrad's m * n.

    For each entry, with mu_r the accumulator of slice r and beta the momentum::

        nu   = min over the slices r that hold the entry of mu_r, plus grad^2
        m    = beta * m + (1 - beta) * grad / sqrt(nu)
        w    = w - lr * m
        mu_r = max of nu over slice r

    Vectors and scalars keep one accumulator per entry (plain Adagrad). Momentum costs one number
    per parameter; `momentum=0` keeps no such buffer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0 or not 0.0 <= momentum < 1.0:
            raise ValueError(
                f"lr {lr}, momentum {momentum}, weight_decay {weight_decay}: SM3 needs lr >= 0, "
                "0 <= momentum < 1 and weight_decay >= 0"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, p: Tensor, grad: Tensor, group: Dict[str, Any]) -> None:
        grad = grad.float()
        weight = p.float()  # p itself when it is float32
        if group["weight_decay"] != 0.0:
            grad = grad.add(weight, alpha=group["weight_decay"])

        # One for each axis of `p`, of p's length on that axis and 1 on the others.
        accumulators = []
        for axis in range(max(p.dim(), 1)):
            size = [n if i == axis else 1 for i, n in enumerate(p.shape)]
            accumulators.append(self.kept(p, f"accumulator_{axis}", size))
        nu = torch.addcmul(reduce(torch.minimum, accumulators), grad, grad)  # broadcasts
        update = grad * (nu + _TINY).rsqrt()

        for axis, accumulator in enumerate(accumulators):
            others = [i for i in range(nu.dim()) if i != axis]
            accumulator.copy_(nu.amax(dim=others, keepdim=True) if others else nu)

        if group["momentum"] > 0.0:
            buffer = self.kept(p, "momentum_buffer")
            buffer.mul_(group["momentum"]).add_(update, alpha=1.0 - group["momentum"])
            update = buffer
        weight.add_(update, alpha=-group["lr"])
        if weight is not p:
            p.copy_(weight)


@dataclass
class SM3Config(FairseqDataclass):
    momentum: float = field(
        default=0.9, metadata={"help": "momentum of SM3; 0 keeps no momentum buffer"}
    )
    weight_decay: float = field(
        default=0.0,
        metadata={"help": "weight decay, added to the gradient", "argparse_alias": "--wd"},
    )
    lr: List[float] = field(default=II("optimization.lr"))


@register_optimizer("sm3", dataclass=SM3Config)
class FairseqSM3(FairseqDense):
    """`--optimizer sm3`."""

    kind = SM3

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        return self.config(momentum=self.cfg.momentum, weight_decay=self.cfg.weight_decay)


class LazyAdam(DenseOptimizer):
    """TensorFlow's LazyAdam: Adam, except for matrices, where a row whose gradient is zero keeps
    its value and its moments.

    Plain Adam moves all rows of an embedding in each update, by their old momentum, which takes
    most of the time when a batch uses few of many words.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if lr < 0.0 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"lr {lr}, betas {betas}: LazyAdam needs lr >= 0 and 0 <= beta < 1")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps})

    def update(self, p: Tensor, grad: Tensor, group: Dict[str, Any]) -> None:
        step = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        mean, square = (self.kept(p, name) for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        scale = (1 - beta2**step) ** 0.5
        rate = group["lr"] * scale / (1 - beta1**step)

        rows = grad.float().norm(dim=1).nonzero().squeeze(1) if p.dim() == 2 else None
        if rows is not None and rows.numel() == p.shape[0]:
            rows = None
        used = (grad, mean, square)
        g, m, v = used if rows is None else (t.index_select(0, rows) for t in used)
        g = g.float()
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = m / v.sqrt().add_(group["eps"] * scale) * -rate
        if rows is None:
            p.add_(update.to(p.dtype))
        else:
            mean.index_copy_(0, rows, m)
            square.index_copy_(0, rows, v)
            p.index_add_(0, rows, update.to(p.dtype))


@dataclass
class LazyAdamConfig(FairseqDataclass):
    adam_betas: str = field(
        default="(0.9, 0.999)", metadata={"help": "decay rates of the two moments"}
    )
    adam_eps: float = field(default=1e-8, metadata={"help": "added to the denominator"})
    lr: List[float] = field(default=II("optimization.lr"))


@register_optimizer("lazy_adam", dataclass=LazyAdamConfig)
class FairseqLazyAdam(FairseqDense):
    """`--optimizer lazy_adam`."""

    kind = LazyAdam

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        first, second = str(self.cfg.adam_betas).strip("()[] ").split(",")
        return self.config(betas=(float(first), float(second)), eps=self.cfg.adam_eps)


@dataclass
class QuadraticWarmupConfig(FairseqDataclass):
    warmup_updates: int = field(
        default=10000,
        metadata={
            "help": "number of updates in which the learning rate grows quadratically to --lr"
        },
    )
    lr: List[float] = field(default=II("optimization.lr"))


@register_lr_scheduler("quadratic_warmup", dataclass=QuadraticWarmupConfig)
class QuadraticWarmupSchedule(FairseqLRScheduler):
    """The schedule of the paper's WMT19 Transformer: lr_t = lr * min(1, (t / warmup)^2) for update
    t = 1, 2, ..."""

    def __init__(self, cfg: QuadraticWarmupConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if len(cfg.lr) != 1:
            raise ValueError(f"--lr {list(cfg.lr)}: quadratic_warmup takes one learning rate")
        self.step_update(0)

    def lr_at(self, update: int) -> float:
        """Learning rate of the update-th update, counted from 1."""
        return float(self.cfg.lr[0] * min(1.0, update / max(self.cfg.warmup_updates, 1)) ** 2)

    def step_update(self, num_updates: int) -> Any:
        """fairseq passes the number of updates done; the rate set here is that of the next one."""
        self.optimizer.set_lr(self.lr_at(num_updates + 1))
        return self.optimizer.get_lr()
