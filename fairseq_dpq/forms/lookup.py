"""Parts of the lookup of product codes in PyTorch, in eager mode and in TorchScript."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.forms.few_ids import ELEMENT, FewIds
from fairseq_dpq.forms.packing import unpack_even, unpack_rows
from fairseq_dpq.tracing import is_graph, is_tracing

_INDICES = (torch.int64, torch.int32)


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
        return _take_elements(values, rows)


def _take_elements(values: Tensor, rows: Tensor) -> Tensor:
    kind = ELEMENT.get(values.shape[1] * values.element_size())
    if kind is None or values.requires_grad or is_tracing():
        return values.index_select(0, rows)
    return values.view(kind).view(-1).index_select(0, rows).view(-1, 1).view(values.dtype)


def prepare(form: Any) -> Any:
    """What looks rows up for the buffers that a CompactEmbedding has now."""
    codes, values, pad = form.codes, form.values, form.padding_idx
    shape = {"shared": form.share_subspaces, "packed": form.packed}
    return native.table(codes, values, form.sizes, padding_idx=pad, **shape) or FewIds(
        codes, values, form.offsets, form.bits, form.packed, pad
    )


def lookup_in_graph(form: Any, indices: Tensor) -> Tensor | None:
    """The operator that looks rows up, or None where the graph shall have standard ones."""
    if indices.dtype not in _INDICES or not has_operators(form):
        return None
    return torch.ops.fairseq_dpq.lookup(form.codes, form.values, indices, *_layout(form))


def logits_in_graph(form: Any, h: Tensor) -> Tensor | None:
    """The operator that computes logits from codes, or None."""
    if (h.requires_grad and torch.is_grad_enabled()) or not has_operators(form):
        return None
    return torch.ops.fairseq_dpq.logits(form.codes, form.values, h, *_layout(form))


def has_operators(form: Any) -> bool:
    """Whether the graph that torch records now has the package's own operators: where the library
    would serve. Inductor makes a fast lookup of PyTorch's operators elsewhere."""
    values = form.values
    kind, cpu = values.dtype in native.VALUE_TYPES, values.device.type == "cpu"
    return is_graph() and kind and cpu and not values.requires_grad and _library_there()


def _library_there() -> bool:
    return native.available()


# torch.compile calls it once and takes the answer as given. The decorator that sets this mark,
# torch.compiler.assume_constant_result, imports the whole compiler: a second, and 70 MB.
_library_there._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _layout(form: Any) -> tuple[int, list[int], bool, bool, int]:
    sizes = form.sizes if len(set(form.sizes)) > 1 else form.sizes[:1]
    pad = -1 if form.padding_idx is None else form.padding_idx
    return form.D, sizes, form.share_subspaces, form.packed, pad
