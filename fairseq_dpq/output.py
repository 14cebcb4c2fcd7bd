"""Output layers that are tied to a table: logits from what the form stores, without the dense
table where the form can do that."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_dpq.forms.base import Form


class CodesLinear(nn.Module):
    """An output layer that is tied to a table: h (..., d) to logits (..., n), as nn.Linear.

    Logits of a stored form are its own. Any other table with a `weight`, such as `DPQEmbedding` in
    training, is multiplied as it is.
    """

    bias: nn.Parameter | None

    def __init__(self, table: nn.Module, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.table: Any = table
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The dense table."""
        return self.table.weight

    def forward(self, h: Tensor) -> Tensor:
        if not isinstance(self.table, Form):
            return F.linear(h, self.table.weight, self.bias)
        logits = self.table.logits(h)
        return logits if self.bias is None else logits + self.bias


class StoredWeight:
    """Stands where code expects the dense table of a tied output layer.

    `F.linear` with it asks the form for logits; every other function of torch, and every
    attribute but the size, gets the dense table, built for that one use.
    """

    def __init__(self, table: Form) -> None:
        self._table = table
        self.shape = torch.Size((table.num_embeddings, table.embedding_dim))
        numbers = next(b for b in table.buffers() if b.is_floating_point())
        self.dtype, self.device = numbers.dtype, numbers.device
        self.requires_grad = False

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 2

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Tensor:
        return self._table.dense()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._table.dense(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            h, weight, bias = _linear_arguments(*args, **kwargs)
            if isinstance(weight, cls) and not isinstance(h, cls):
                out = weight._table.logits(h)
                return out if bias is None else out + bias

        def dense(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(dense(item) for item in value)
            return value._table.dense() if isinstance(value, cls) else value

        return func(*dense(args), **{key: dense(value) for key, value in kwargs.items()})


def _linear_arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias
