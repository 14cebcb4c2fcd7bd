"""SM3-II (Anil et al., 2019, https://arxiv.org/abs/1901.11150): Adagrad with sublinear memory.
`SM3` is a plain torch optimiser, `FairseqSM3` its `--optimizer sm3` form."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor

from fairseq_dpq.fairseq_plugin.optim.dense import DenseOptimizer

# The rule divides 0 by 0 where a gradient has always been zero and calls that 0.
TINY = 1e-30


class SM3(DenseOptimizer):
    """SM3-II. A (m, n) matrix keeps m + n accumulators in place of Adagrad's m * n.

    For each entry, with mu_r the accumulator of slice r and beta the momentum::

        nu   = min over the slices r that hold the entry of mu_r, plus grad^2
        m    = beta * m + (1 - beta) * grad / sqrt(nu)
        w    = w - lr * m
        mu_r = max of nu over slice r

    Vectors and scalars keep one accumulator per entry (plain Adagrad). Momentum costs one number
    per parameter; `momentum=0` keeps no such buffer. All state is float32 for parameters of any
    dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0.0:
            raise ValueError(f"lr {lr} is negative; SM3 needs lr >= 0")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum {momentum} is out of range; SM3 needs 0 <= momentum < 1")
        if weight_decay < 0.0:
            raise ValueError(f"weight_decay {weight_decay} is negative; SM3 needs >= 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, p: Tensor, grad: Tensor, group: Dict[str, Any]) -> None:
        grad = grad.float()
        weight = p.float()  # p itself when it is float32
        if group["weight_decay"] != 0.0:
            grad = grad.add(weight, alpha=group["weight_decay"])

        state = self.state[p]
        accumulators = self._accumulators(p, state)
        nu = accumulators[0]
        for accumulator in accumulators[1:]:
            nu = torch.minimum(nu, accumulator)  # broadcasts to p's shape
        nu = torch.addcmul(nu, grad, grad)
        update = grad * (nu + TINY).rsqrt()

        for axis, accumulator in enumerate(accumulators):
            others = [i for i in range(nu.dim()) if i != axis]
            accumulator.copy_(nu.amax(dim=others, keepdim=True) if others else nu)

        if group["momentum"] > 0.0:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad)
            buffer = self.on_device(state, "momentum_buffer", p)
            buffer.mul_(group["momentum"]).add_(update, alpha=1.0 - group["momentum"])
            update = buffer
        weight.add_(update, alpha=-group["lr"])
        if weight is not p:
            p.copy_(weight)

    def _accumulators(self, p: Tensor, state: Dict[str, Any]) -> List[Tensor]:
        """One accumulator per axis of `p`, of p's length on that axis and 1 on the others."""
        shape = list(p.shape)
        found = []
        for axis in range(max(len(shape), 1)):
            name = f"accumulator_{axis}"
            if name not in state:
                size = [n if i == axis else 1 for i, n in enumerate(shape)]
                state[name] = torch.zeros(size, dtype=torch.float32, device=p.device)
            found.append(self.on_device(state, name, p))
        return found


@dataclass
class SM3Config(FairseqDataclass):
    momentum: float = field(
        default=0.9,
        metadata={"help": "momentum of SM3; 0 keeps no momentum buffer"},
    )
    weight_decay: float = field(
        default=0.0,
        metadata={"help": "weight decay, added to the gradient", "argparse_alias": "--wd"},
    )
    lr: List[float] = field(default=II("optimization.lr"))


@register_optimizer("sm3", dataclass=SM3Config)
class FairseqSM3(FairseqOptimizer):
    """`--optimizer sm3`. With `--fp16`, pass `--fp16-no-flatten-grads` or use
    `--memory-efficient-fp16`: in a flattened model SM3 would be plain Adagrad."""

    def __init__(self, cfg: SM3Config, params: Iterable[Any]) -> None:
        super().__init__(cfg)
        self._optimizer = SM3(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        """Overrides the checkpoint's settings on resume; builds the optimiser of a shard."""
        lr = self.cfg.lr
        return {
            "lr": float(lr if isinstance(lr, (int, float)) else lr[0]),
            "momentum": float(self.cfg.momentum),
            "weight_decay": float(self.cfg.weight_decay),
        }
