"""Lookup and logits in PyTorch: what the library computes, and the fall-back without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_dpq.forms.packing import even_width, is_wide, unpack_even, unpack_plan, unpack_rows

# A value row of one of these sizes is copied as a single element, several times faster than as a
# row of small floats. Each dtype is only ever moved, never computed with.
_ELEMENT = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_FEW = 16  # indices: below, the number of operators counts, not their speed
_ROWS = 1 << 12  # table rows whose codes are widened at once


@dataclass
class Layout:
    """Codes and values with what follows from the group sizes, computed once."""

    codes: Tensor  # (n, D), or (n, bytes) when packed
    values: Tensor  # (rows, d / D)
    sizes: Sequence[int]
    shared: bool
    packed: bool
    padding_idx: int | None
    offsets: Tensor = field(init=False)  # (D,) the first value row of each group
    elements: Tensor | None = field(init=False)  # the values as one number a row

    def __post_init__(self) -> None:
        first = [0]
        for size in self.sizes[:-1]:
            first.append(0 if self.shared else first[-1] + size)
        self.offsets = torch.tensor(first, dtype=torch.int32, device=self.codes.device)
        bits = [(size - 1).bit_length() for size in self.sizes]
        self.plan = unpack_plan(bits).to(self.codes.device)
        self.even, self.wide = even_width(bits), is_wide(bits)
        kind = _ELEMENT.get(self.values.shape[1] * self.values.element_size())
        self.elements = None if kind is None else self.values.view(kind).view(-1)

    def value_rows(self, rows: Tensor) -> Tensor:
        """Stored rows of codes as rows of the value matrix: (rows, D)."""
        if self.packed and self.even:
            rows = unpack_even(rows, self.even, len(self.sizes))
        elif self.packed:
            rows = unpack_rows(rows, self.plan, self.wide)
        return rows + self.offsets


def lookup(layout: Layout, indices: Tensor) -> Tensor:
    """The rows of indices of any shape, padding as zeros."""
    flat = indices if indices.dim() == 1 else indices.reshape(-1)
    rows = layout.value_rows(layout.codes.index_select(0, flat))
    d = len(layout.sizes) * layout.values.shape[1]
    if layout.elements is None or flat.numel() <= _FEW:
        out = F.embedding(rows, layout.values)
    else:
        out = layout.elements.index_select(0, rows.view(-1)).view(-1, 1).view(layout.values.dtype)
    out = out.view(*indices.shape, d)
    pad = layout.padding_idx
    if pad is not None and (flat.numel() > _FEW or pad in flat.tolist()):
        out.view(-1, d).masked_fill_((flat == pad).unsqueeze(-1), 0)
    return out


def logits(layout: Layout, h: Tensor) -> Tensor:
    """h (..., d) times the transposed table, (..., n), by partial sums over the codes."""
    D, size = len(layout.sizes), layout.values.shape[1]
    rows = h.reshape(-1, D, size).float()
    values = layout.values.float()
    if layout.shared:  # (D, K) sums for each row of h
        partial = torch.einsum("bjs,ks->jkb", rows, values[: layout.sizes[0]])
    elif len(set(layout.sizes)) == 1:
        groups = values[: D * layout.sizes[0]].view(D, -1, size)
        partial = torch.einsum("bjs,jks->jkb", rows, groups)
    else:
        parts = values[: sum(layout.sizes)].split(list(layout.sizes))
        partial = torch.cat([part @ rows[:, j].t() for j, part in enumerate(parts)])
    # One column must lie as such: embedding_bag is thirty times slower on other strides.
    partial = partial.reshape(-1).view(-1, rows.shape[0])
    shift = layout.offsets
    if layout.shared:  # value rows are shared, sums are not
        shift = torch.arange(D, device=h.device, dtype=torch.int32) * layout.sizes[0]
    n = layout.codes.shape[0]
    out = torch.empty(rows.shape[0], n, device=h.device)
    for start in range(0, n, _ROWS):
        picked = layout.value_rows(layout.codes[start : start + _ROWS]) + (shift - layout.offsets)
        out[:, start : start + _ROWS] = F.embedding_bag(picked, partial, mode="sum").t()
    if layout.padding_idx is not None:
        out[:, layout.padding_idx] = 0
    return out.view(*h.shape[:-1], n).to(h.dtype)
