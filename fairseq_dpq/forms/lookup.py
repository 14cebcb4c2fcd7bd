"""How product codes are looked up and multiplied: parts in PyTorch, in eager mode and in
TorchScript, and the choice between them, the native library and the operators of a graph."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.files.memory import BufferGuard
from fairseq_dpq.forms.packing import is_wide, unpack_even, unpack_plan, unpack_rows
from fairseq_dpq.native.buffers import CPU
from fairseq_dpq.tracing import is_graph, is_onnx, is_tracing

_INDICES = (torch.int64, torch.int32)
_ROWS = 1 << 12  # table rows whose codes are widened at once
# A value row of one of these sizes is copied as a single element, several times faster than as a
# row of small floats. Each dtype is only ever moved, never computed with.
ELEMENT = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SMALL = 16


class SmallBatchLookup(BufferGuard):
    """Lookup of a few ids in PyTorch, where the number of operators counts, not their speed: what a
    decoding step needs of a table, prepared once."""

    def __init__(self, buffers: native.Buffers, offsets: Tensor) -> None:
        codes, values, sizes, _, self._packed, padding_idx = buffers
        super().__init__(codes, values, padding_idx)
        self._d, self._dtype = len(sizes) * values.shape[1], values.dtype
        kind = ELEMENT.get(values.shape[1] * values.element_size())
        here = values.is_contiguous() and codes.device == values.device == CPU
        here = here and sys.byteorder == "little" and not (self._packed and is_wide(buffers.bits))
        self._elements: Tensor | None = None
        if here and kind is not None:
            self._elements = self._values.view(kind).view(-1)
            self._offsets = offsets.long()
            plan = unpack_plan(buffers.bits)
            self._pairs = plan[:2].t().reshape(-1)  # the two bytes of each code, side by side
            self._shift, self._mask = plan[3].long(), plan[4].long()

    def lookup(self, indices: Tensor) -> Tensor | None:
        """The rows of a few indices, none of them padding, or None."""
        if self._elements is None or indices.numel() > _SMALL or indices.device != CPU:
            return None
        if self._of_values.requires_grad:
            return None
        flat = indices if indices.dim() == 1 else indices.reshape(-1)
        if self._padding_idx is not None:
            try:
                if self._padding_idx in flat.tolist():
                    return None
            except RuntimeError:  # a tensor without memory of its own, as under vmap
                return None
        rows = self._codes.index_select(0, flat)
        if self._packed:
            words = rows.index_select(1, self._pairs).view(torch.int16)
            rows = (words >> self._shift).bitwise_and_(self._mask).add_(self._offsets)
        else:
            rows = rows + self._offsets
        out = self._elements.take(rows).view(self._dtype)
        return out if indices.dim() == 1 else out.view(*indices.shape, self._d)


def unpack(rows: Tensor, plan: Tensor, wide: bool, even: int, D: int) -> Tensor:
    """Packed rows as codes (rows, D)."""
    if torch.jit.is_scripting():
        return unpack_rows(rows, plan, wide)
    else:  # TorchScript saves views of another dtype wrongly, ONNX has none
        views = even > 0 and not is_tracing()
        return unpack_even(rows, even, D) if views else unpack_rows(rows, plan, wide)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Rows (rows,) of the value matrix."""
    if torch.jit.is_scripting():
        return values.index_select(0, rows)
    else:  # TorchScript compiles no branch that it cannot reach
        kind = ELEMENT.get(values.shape[1] * values.element_size())
        if kind is None or values.requires_grad or is_tracing():
            return values.index_select(0, rows)
        return values.view(kind).view(-1).index_select(0, rows).view(-1, 1).view(values.dtype)


def lookup_in_graph(form: Any, indices: Tensor) -> Tensor | None:
    """The operator that looks rows up, or None where the graph shall have standard ones."""
    if indices.dtype not in _INDICES or not has_operators(form):
        return None
    return torch.ops.fairseq_dpq.lookup(form.codes, form.values, indices, *_layout(form))


def logits_in_graph(form: Any, h: Tensor) -> Tensor | None:
    """The operator that computes logits from codes, or None.

    onnxruntime rebuilds the table once, as it loads the codes, and multiplies: sums of gathered
    products take several times as long there (benchmarks/README.md).
    """
    if is_onnx():
        return F.linear(h, form.dense().to(h.dtype))
    if (h.requires_grad and torch.is_grad_enabled()) or not has_operators(form):
        return None
    return torch.ops.fairseq_dpq.logits(form.codes, form.values, h, *_layout(form))


def has_operators(form: Any) -> bool:
    """Whether the graph that torch records now has the package's own operators: where the library
    would serve. Inductor makes a fast lookup of PyTorch's operators elsewhere."""
    values = form.values
    kind, cpu = values.dtype in native.VALUE_TYPES, values.device.type == "cpu"
    return is_graph() and kind and cpu and not values.requires_grad and native.available()


def _layout(form: Any) -> tuple[int, list[int], bool, bool, int]:
    sizes = form.sizes if len(set(form.sizes)) > 1 else form.sizes[:1]
    pad = -1 if form.padding_idx is None else form.padding_idx
    return form.D, sizes, form.share_subspaces, form.packed, pad


def logits_by_partial_sums(table: Any, h: Tensor) -> Tensor:
    """Logits of a CompactEmbedding in PyTorch, with gradients.

    In each group the products of h with the K value rows are worked out once; a logit is the sum of
    D of them. Sums are ordered otherwise than in a matrix product, which is faster in both
    directions where values are trained.
    """
    if table.values.requires_grad and torch.is_grad_enabled():
        return F.linear(h, table.dense().to(h.dtype))
    D, sizes, n = table.D, table.sizes, table.num_embeddings
    rows = h.reshape(-1, D, table.embedding_dim // D)
    rows = rows.to(torch.promote_types(torch.float32, h.dtype))
    values = table.values[: table.value_rows]
    partial = native.products(rows, values, sizes, table.share_subspaces)
    first = table.offsets
    if table.share_subspaces:  # value rows are shared, products are not
        first = torch.arange(0, D * sizes[0], sizes[0], device=h.device, dtype=torch.int32)
    out = partial.new_empty(rows.shape[0], n)
    for start in range(0, n, _ROWS):
        codes = table.codes[start : start + _ROWS]
        if table.packed:
            codes = unpack(codes, table.plan, table.wide, table.even, D)
        bag = F.embedding_bag(codes + first, partial, mode="sum")
        out[:, start : start + _ROWS] = bag.t()
    if table.padding_idx is not None:
        out[:, table.padding_idx] = 0
    return out.view(*h.shape[:-1], n).to(h.dtype)
