"""Parts of the lookup of product codes in PyTorch, in eager mode and in TorchScript."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_dpq.forms.few_ids import ELEMENT
from fairseq_dpq.forms.packing import unpack_even, unpack_rows
from fairseq_dpq.tracing import is_tracing


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
