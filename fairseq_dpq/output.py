"""Logits of a tied output layer straight from the codes, without the dense table.

In each group the products of h with the K value rows are worked out once; the logit of a symbol is
the sum of D of them, picked by its codes. Sums are ordered otherwise than in a matrix product, so
logits differ from it in the last digits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_dpq.forms.lookup import logits_in_graph, unpack
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.tracing import is_exporting, is_tracing

_ROWS = 1 << 12  # table rows whose codes are widened at once


class CodesLinear(nn.Module):
    """An output layer that is tied to a table: h (..., d) to logits (..., n), as nn.Linear.

    Logits of a `CompactEmbedding` come from its codes. Any other table with a `weight`, such as
    `DPQEmbedding` in training, is multiplied as it is.
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
        if not isinstance(self.table, CompactEmbedding):
            return F.linear(h, self.table.weight, self.bias)
        logits = codes_logits(self.table, h)
        return logits if self.bias is None else logits + self.bias


def codes_logits(table: CompactEmbedding, h: Tensor) -> Tensor:
    """h (..., d) times the transposed table, (..., n), in h's dtype."""
    if h.shape[-1] != table.embedding_dim:
        raise ValueError(f"h has {h.shape[-1]} numbers a row, the table {table.embedding_dim}")
    if is_tracing():
        found = logits_in_graph(table, h)
    else:
        known = table.native_table()
        found = None if known is None else known.logits(h)
    return found if found is not None else by_partial_sums(table, h)


def by_partial_sums(table: CompactEmbedding, h: Tensor) -> Tensor:
    """The same in PyTorch, with gradients."""
    D, sizes, shared = table.D, table.sizes, table.share_subspaces
    size = table.embedding_dim // D
    dtype = torch.promote_types(torch.float32, h.dtype)
    rows = h.reshape(-1, D, size).to(dtype)
    values = table.values[: table.value_rows].to(dtype)
    if shared:  # products for each row of h: (D * K, rows)
        partial = torch.einsum("bjs,ks->jkb", rows, values)
    elif len(set(sizes)) == 1:
        partial = torch.einsum("bjs,jks->jkb", rows, values.view(D, -1, size))
    else:
        parts = values.split(sizes)
        partial = torch.cat([part @ rows[:, j].t() for j, part in enumerate(parts)])
    # One column must lie as such: embedding_bag is thirty times slower on other strides.
    partial = partial.reshape(-1).view(-1, rows.shape[0])
    first = table.offsets
    if shared:  # value rows are shared, products are not
        first = torch.arange(0, D * sizes[0], sizes[0], device=h.device, dtype=torch.int32)
    n = table.num_embeddings
    out = partial.new_empty(rows.shape[0], n)
    for start in range(0, n, _ROWS):
        codes = table.codes[start : start + _ROWS]
        if table.packed:
            codes = unpack(codes, table.plan, table.wide, table.even, D)
        if is_exporting():  # ONNX has no bags: they would become a loop over the rows
            bag = F.embedding(codes + first, partial).sum(1)
        else:
            bag = F.embedding_bag(codes + first, partial, mode="sum")
        out[:, start : start + _ROWS] = bag.t()
    if table.padding_idx is not None:
        out[:, table.padding_idx] = 0
    return out.view(*h.shape[:-1], n).to(h.dtype)


class CodesWeight:
    """Stands where code expects the dense table of a tied output layer.

    `F.linear` with it computes logits from the codes; every other function of torch, and every
    attribute but the size, gets the dense table, built for that one use.
    """

    def __init__(self, table: CompactEmbedding) -> None:
        self._table = table
        self.shape = torch.Size((table.num_embeddings, table.embedding_dim))
        self.dtype, self.device = table.values.dtype, table.values.device
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
                out = codes_logits(weight._table, h)
                return out if bias is None else out + bias

        def dense(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(dense(item) for item in value)
            return value._table.dense() if isinstance(value, cls) else value

        return func(*dense(args), **{key: dense(value) for key, value in kwargs.items()})


def _linear_arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias
