"""What the optimisers of this package share: dense gradients, parameter by parameter, and state in
float32 for parameters of any dtype."""

from typing import Any, Callable, Dict, Optional

import torch
from torch import Tensor


class DenseOptimizer(torch.optim.Optimizer):
    """Calls `update` for each parameter that has a gradient."""

    # Read by fairseq. float16 parameters are updated through float32, and a model flattened into
    # one vector would have neither rows nor slices.
    supports_memory_efficient_fp16 = True
    supports_flat_params = False

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], float]] = None
    ) -> Optional[float]:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} only takes dense gradients; build embeddings with "
                        "sparse=False"
                    )
                self.update(p, p.grad, group)
        return loss

    def update(self, p: Tensor, grad: Tensor, group: Dict[str, Any]) -> None:
        """Move one parameter."""
        raise NotImplementedError

    @staticmethod
    def on_device(state: Dict[str, Any], name: str, p: Tensor) -> Tensor:
        """A tensor of a parameter's state, where the parameter is."""
        # fairseq's memory-efficient fp16 puts the checkpoint's own (CPU) tensors back on resume.
        tensor = state[name]
        if tensor.device != p.device or tensor.dtype != torch.float32:
            tensor = state[name] = tensor.to(device=p.device, dtype=torch.float32)
        return tensor
