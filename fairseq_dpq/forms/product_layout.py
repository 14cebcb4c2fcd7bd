"""The tensors of product codes: what they must be by the settings that a file claims for them."""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor

from fairseq_dpq.forms.base import Layout, Settings
from fairseq_dpq.forms.packing import code_bits
from fairseq_dpq.sizes import MAX_K

_MOST_CODES = 1 << 24  # over all groups, unless the tensors hold more: counting them takes memory


def product_layout(
    num_embeddings: int, embedding_dim: int, settings: Settings, found: Mapping[str, Tensor]
) -> dict[str, Layout]:
    """The layout by `settings`, with the numbers of codes that the tensors `found` show."""
    D, shared = settings["D"], settings["share_subspaces"]
    if D < 1 or embedding_dim % D:
        raise ValueError(f"D={D} does not divide embedding_dim={embedding_dim}")
    sizes = stored_sizes(D, shared, found)
    if D * max(sizes) > max(_MOST_CODES, found["values"].numel()):
        raise ValueError(f"{D} groups of up to {max(sizes)} codes: more than the values hold")
    K = settings["K"]
    if not max(sizes) <= K <= MAX_K:
        raise ValueError(f"K={K}, but a group has {max(sizes)} codes")
    bits = sum(code_bits(size) for size in sizes)
    return {
        "codes": Layout((num_embeddings, max(1, (bits + 7) // 8)), (torch.uint8,)),
        "values": Layout((sizes[0] if shared else sum(sizes), embedding_dim // D)),
        "sizes": Layout((D,), (torch.int32,), optional=True),
    }


def stored_sizes(D: int, shared: bool, found: Mapping[str, Tensor]) -> list[int]:
    """The number of codes of each group, by the tensors that are there."""
    values, sizes = found.get("values"), found.get("sizes")
    if values is None or values.dim() != 2:
        raise ValueError("values: expected a tensor of two dimensions, found none")
    if sizes is None:
        return _valid([len(values) if shared else len(values) // D] * D)
    if tuple(sizes.shape) != (D,) or sizes.dtype != torch.int32:
        raise ValueError(
            f"sizes: expected torch.int32 of shape ({D},), found {sizes.dtype} of shape "
            f"{tuple(sizes.shape)}"
        )
    listed = _valid(sizes.tolist())
    if shared and len(set(listed)) > 1:
        raise ValueError("sizes: groups that share their values must have the same size")
    return listed


def _valid(sizes: list[int]) -> list[int]:
    if not 1 <= min(sizes) <= max(sizes) <= MAX_K:
        raise ValueError(
            f"a group has from 1 to {MAX_K} codes, found from {min(sizes)} to {max(sizes)}"
        )
    return sizes
