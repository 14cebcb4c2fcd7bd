"""Parts of the lookup of product codes in PyTorch, in eager mode and in TorchScript."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_dpq.forms.packing import unpack_even, unpack_rows
from fairseq_dpq.tracing import is_tracing

# A value row of one of these sizes is copied as a single element, several times faster than as a
# row of small floats. Each dtype is only ever moved, never computed with.
_ELEMENT = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_FEW = 16  # indices: below, the number of operators counts, not their speed


def unpack(rows: Tensor, plan: Tensor, wide: bool, even: int, D: int) -> Tensor:
    """Packed rows as codes (rows, D)."""
    if torch.jit.is_scripting():
        return unpack_rows(rows, plan, wide)
    else:  # a saved TorchScript program takes the dtype of a view for its shape
        return unpack_even(rows, even, D) if even else unpack_rows(rows, plan, wide)


def point_at_padding(rows: Tensor, flat: Tensor, padding_idx: int, zeros: int) -> Tensor:
    """Rows of the value matrix (tokens, D), those of padding replaced by the row of `zeros`."""
    without = False
    if not torch.jit.is_scripting():  # TorchScript compiles no branch that it cannot reach
        without = _few_without(flat, padding_idx)
    if without:
        return rows
    pad = (flat == padding_idx).unsqueeze(-1)
    return rows.masked_fill(pad, zeros)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """The rows (tokens, D) of the value matrix, one after the other."""
    if torch.jit.is_scripting():
        return values.index_select(0, rows.reshape(-1))
    else:
        return _take_elements(values, rows)


def _take_elements(values: Tensor, rows: Tensor) -> Tensor:
    if is_tracing() or values.requires_grad:
        return values.index_select(0, rows.reshape(-1))
    if rows.shape[0] <= _FEW:
        return F.embedding(rows, values)
    kind = _ELEMENT.get(values.shape[1] * values.element_size())
    if kind is None:
        return values.index_select(0, rows.reshape(-1))
    elements = values.view(kind).view(-1)
    return elements.index_select(0, rows.reshape(-1)).view(-1, 1).view(values.dtype)


def _few_without(flat: Tensor, padding_idx: int) -> bool:
    """Whether these are few indices, none of them padding."""
    if is_tracing() or flat.numel() > _FEW or flat.device.type != "cpu":
        return False
    try:
        return padding_idx not in flat.tolist()
    except RuntimeError:  # a tensor without memory of its own, as under vmap
        return False
