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


def lookup(codes: Tensor, values: Tensor, indices: Tensor, *layout: Any) -> Tensor:
    """The rows (..., d) of indices (...)."""
    buffers = _buffers(codes, values, *layout)
    table = native.table(buffers)
    found = None if table is None else table.lookup(indices)
    return CompactEmbedding.of(buffers)(indices) if found is None else found


def fake_lookup(codes: Tensor, values: Tensor, indices: Tensor, D: int, *_: Any) -> Tensor:
    return values.new_empty([*indices.shape, D * values.shape[1]])


def logits(codes: Tensor, values: Tensor, h: Tensor, *layout: Any) -> Tensor:
    """h (..., d) times the transposed table: (..., n)."""
    buffers = _buffers(codes, values, *layout)
    table = native.table(buffers)
    found = None if table is None else table.logits(h)
    return logits_by_partial_sums(CompactEmbedding.of(buffers), h) if found is None else found


def fake_logits(codes: Tensor, values: Tensor, h: Tensor, *_: Any) -> Tensor:
    return h.new_empty([*h.shape[:-1], codes.shape[0]])


def _buffers(codes: Tensor, values: Tensor, D: int, sizes: Sequence[int], *rest: Any) -> Any:
    shared, packed, padding = rest
    every = list(sizes) * (D // len(sizes))
    return native.Buffers(codes, values, every, shared, packed, None if padding < 0 else padding)


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
