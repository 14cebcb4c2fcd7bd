"""The tensors of product codes: what they must be by the settings that a file claims for them, and
how a state_dict is loaded."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import Tensor

from fairseq_dpq.files.memory import large_zeros
from fairseq_dpq.forms.base import Layout, Settings
from fairseq_dpq.forms.packing import code_bits, code_dtype, unpack_codes
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


@torch.no_grad()
def load_tensors(form: Any, tensors: Mapping[str, Tensor], assign: bool) -> list[str]:
    """Load the tensors of a state_dict into a CompactEmbedding; what is wrong, if anything is.

    With `assign`, the tensors' own memory, dtype and device are taken where they can be.
    """
    D, shared = form.D, form.share_subspaces
    try:
        sizes = stored_sizes(D, shared, tensors)
        settings = {"D": D, "share_subspaces": shared, "K": max(sizes)}
        layout = product_layout(form.num_embeddings, form.embedding_dim, settings, tensors)
        for name in ("codes", "values"):
            found, wanted = tuple(tensors[name].shape), layout[name].shape
            if found != wanted:
                raise ValueError(f"{name}: size mismatch, found {found}, this model needs {wanted}")
    except ValueError as error:
        return [str(error)]
    codes, values = tensors["codes"], tensors["values"]
    if assign or sizes != form.sizes:
        like = values if assign else form.values
        form._set_groups(sizes, like.device)
        rows = form.value_rows + (0 if form.padding_idx is None else 1)
        form.values = like.new_zeros(rows, values.shape[1])
    form.values[: form.value_rows] = values
    kind = torch.uint8 if form.packed else code_dtype(max(sizes))
    if not form.packed:
        codes = unpack_codes(codes, form.bits, kind)
    if assign and codes.is_contiguous():
        form.codes = codes
        return []
    if codes.shape != form.codes.shape or kind != form.codes.dtype:
        form.codes = large_zeros(codes.shape[0], codes.shape[1], kind, form.codes.device)
    form.codes.copy_(codes)
    return []
