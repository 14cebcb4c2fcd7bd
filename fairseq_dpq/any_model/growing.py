"""`add_rows`: new tokens for a model whose table is compressed already."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_dpq.forms.base import Form
from fairseq_dpq.model import EmbeddingTable, placed, put


@torch.no_grad()
def add_rows(model: nn.Module, rows: int | Tensor, which: str | None = None) -> int:
    """Add rows to a compressed table, in place; its number of rows afterwards.

    The new rows are stored as the others are: product codes take the nearest value of each group.
    Output layers that are tied to the table get as many new outputs, with a bias of zero.

    Args:
        rows: The new rows (m, d), or their number: each is then the mean of the table.
        which: Path of the table; needed if the model has several compressed ones.
    """
    found = _chosen(placed(model, Form), which)
    form: Form = found.module
    old = form.num_embeddings
    if isinstance(rows, int):
        if rows < 1:
            raise ValueError(f"rows={rows}: give 1 or more; rows cannot be removed")
        rows = form.dense().float().mean(0, keepdim=True).expand(rows, -1)
    if rows.dim() != 2 or rows.shape[1] != form.embedding_dim:
        shape = tuple(rows.shape)
        raise ValueError(f"rows has shape {shape}; give (number, {form.embedding_dim})")
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("rows holds NaN or infinite numbers")
    grown = form.with_rows(rows)
    for layer in found.tied.values():
        _grow_bias(model, layer, len(rows))
    put(model, found, grown)
    if "transformers" in sys.modules:
        from fairseq_dpq.any_model.huggingface import attach, follow_growth

        follow_growth(model, grown, old)
        attach(model)
    return grown.num_embeddings


def _chosen(tables: list[EmbeddingTable], which: str | None) -> EmbeddingTable:
    listed = ", ".join(path for found in tables for path in found.paths)
    if not tables:
        raise ValueError("the model has no compressed table; resize its full table instead")
    if which is None and len(tables) > 1:
        raise ValueError(f"the model has several compressed tables: give which, one of {listed}")
    for found in tables:
        if which is None or which in found.paths:
            return found
    raise ValueError(f"which={which!r}: the model has {listed}")


def _grow_bias(model: nn.Module, layer: Any, more: int) -> None:
    """Zeros for new outputs, wherever the bias is used."""
    bias = layer.bias
    if bias is None:
        return
    grown = nn.Parameter(torch.cat([bias, bias.new_zeros(more)]), bias.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is bias:
                module._parameters[name] = grown
