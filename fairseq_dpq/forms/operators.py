"""Lookup and logits of a compact table as operators of torch, which torch.compile and torch.export
keep as one node each: `torch.ops.fairseq_dpq.lookup` and `torch.ops.fairseq_dpq.logits`.

They are only for graphs. In eager mode the modules call the native library directly, because the
dispatcher takes longer than a small lookup. A graph that is loaded elsewhere needs this package,
but not the library: PyTorch serves where it is missing.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.forms.lookup import logits_by_partial_sums
from fairseq_dpq.forms.product_codes import CompactEmbedding

_TABLE = "int D, int[] sizes, bool shared, bool packed, int padding"


def lookup(codes: Tensor, values: Tensor, indices: Tensor, D: int, *layout: Any) -> Tensor:
    """The rows (..., d) of indices (...)."""
    table = _native(codes, values, D, *layout)
    found = None if table is None else table.lookup(indices)
    return _form(codes, values, D, *layout)(indices) if found is None else found


def fake_lookup(codes: Tensor, values: Tensor, indices: Tensor, D: int, *layout: Any) -> Tensor:
    return values.new_empty([*indices.shape, D * values.shape[1]])


def logits(codes: Tensor, values: Tensor, h: Tensor, D: int, *layout: Any) -> Tensor:
    """h (..., d) times the transposed table: (..., n)."""
    table = _native(codes, values, D, *layout)
    found = None if table is None else table.logits(h)
    return logits_by_partial_sums(_form(codes, values, D, *layout), h) if found is None else found


def fake_logits(codes: Tensor, values: Tensor, h: Tensor, D: int, *layout: Any) -> Tensor:
    return h.new_empty([*h.shape[:-1], codes.shape[0]])


def _native(
    codes: Tensor,
    values: Tensor,
    D: int,
    sizes: Sequence[int],
    shared: bool,
    packed: bool,
    padding: int,
) -> Any:
    pad = None if padding < 0 else padding
    sizes = list(sizes) * (D // len(sizes))
    return native.table(codes, values, sizes, shared=shared, packed=packed, padding_idx=pad)


def _form(
    codes: Tensor,
    values: Tensor,
    D: int,
    sizes: Sequence[int],
    shared: bool,
    packed: bool,
    padding: int,
) -> CompactEmbedding:
    """A module with these tensors, not copied."""
    d, pad = D * values.shape[1], None if padding < 0 else padding
    form = CompactEmbedding(
        1,
        d,
        None if pad is None else 0,
        K=max(sizes),
        D=D,
        sizes=list(sizes) * (D // len(sizes)),
        share_subspaces=shared,
        packed=packed,
        dtype=values.dtype,
        device=values.device,
    )
    form.codes, form.values = codes, values
    form._set_size(codes.shape[0], d, pad)
    return form


def _register(name: str, argument: str, function: Callable, fake: Callable) -> None:
    qualified = f"fairseq_dpq::{name}"
    schema = f"(Tensor codes, Tensor values, Tensor {argument}, {_TABLE}) -> Tensor"
    torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(qualified, "default", function)
    torch.library.register_fake(qualified, fake)


# Older releases of torch trace through the PyTorch code of the modules.
if hasattr(torch.library, "register_fake") and not hasattr(torch.ops.fairseq_dpq, "lookup"):
    _register("lookup", "indices", lookup, fake_lookup)
    _register("logits", "h", logits, fake_logits)
