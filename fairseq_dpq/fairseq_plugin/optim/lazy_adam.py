"""Adam that leaves the rows of a table alone which a batch does not use: TensorFlow's LazyAdam.
`LazyAdam` is a plain torch optimiser, `FairseqLazyAdam` its `--optimizer lazy_adam` form."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Tuple

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor

from fairseq_dpq.fairseq_plugin.optim.dense import DenseOptimizer


class LazyAdam(DenseOptimizer):
    """Adam, except for matrices: a row whose gradient is zero keeps its value and its moments.

    Plain Adam moves all rows of an embedding in each update, by their old momentum, which takes
    most of the time when a batch uses few of many words. Gradients are dense. All state is float32
    for parameters of any dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if lr < 0.0:
            raise ValueError(f"lr {lr} is negative; LazyAdam needs lr >= 0")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas {betas} are out of range; LazyAdam needs 0 <= beta < 1")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps})

    def update(self, p: Tensor, grad: Tensor, group: Dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        state["step"] += 1
        mean, square = (self.on_device(state, name, p) for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        scale = (1 - beta2 ** state["step"]) ** 0.5
        rate = group["lr"] * scale / (1 - beta1 ** state["step"])

        rows = grad.float().norm(dim=1).nonzero().squeeze(1) if p.dim() == 2 else None
        if rows is not None and rows.numel() == p.shape[0]:
            rows = None
        g = (grad if rows is None else grad.index_select(0, rows)).float()
        m = mean if rows is None else mean.index_select(0, rows)
        v = square if rows is None else square.index_select(0, rows)
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
class FairseqLazyAdam(FairseqOptimizer):
    """`--optimizer lazy_adam`. With `--fp16`, pass `--fp16-no-flatten-grads` or use
    `--memory-efficient-fp16`: a flattened model has no rows."""

    def __init__(self, cfg: LazyAdamConfig, params: Iterable[Any]) -> None:
        super().__init__(cfg)
        self._optimizer = LazyAdam(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        """Overrides the checkpoint's settings on resume; builds the optimiser of a shard."""
        lr = self.cfg.lr
        betas = str(self.cfg.adam_betas).strip("()[] ").split(",")
        return {
            "lr": float(lr if isinstance(lr, (int, float)) else lr[0]),
            "betas": (float(betas[0]), float(betas[1])),
            "eps": float(self.cfg.adam_eps),
        }
