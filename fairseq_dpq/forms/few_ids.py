"""Lookup of a few ids in PyTorch, where the number of operators counts, not their speed."""

from __future__ import annotations

import sys
from typing import Sequence

import torch
from torch import Tensor

from fairseq_dpq.forms.packing import is_wide, unpack_plan
from fairseq_dpq.memory import HeldTable

# A value row of one of these sizes is copied as a single element, several times faster than as a
# row of small floats. Each dtype is only ever moved, never computed with.
ELEMENT = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
FEW = 16


class FewIds(HeldTable):
    """What a decoding step needs of a table, prepared once; None from `lookup` where the general
    way must serve."""

    def __init__(
        self,
        codes: Tensor,
        values: Tensor,
        offsets: Tensor,
        bits: Sequence[int],
        packed: bool,
        padding_idx: int | None,
    ) -> None:
        super().__init__(codes, values, padding_idx)
        self._d = len(bits) * values.shape[1]
        self._dtype, self._packed = values.dtype, packed
        kind = ELEMENT.get(values.shape[1] * values.element_size())
        plain = values.is_contiguous() and codes.is_cpu and values.is_cpu
        possible = plain and kind is not None and not (packed and is_wide(bits))
        self._elements: Tensor | None = None
        if possible and kind is not None and sys.byteorder == "little":
            self._elements = self._values.view(kind).view(-1)
            self._offsets = offsets.long()
            plan = unpack_plan(bits)
            self._pairs = plan[:2].t().reshape(-1)  # the two bytes of each code, side by side
            self._shift, self._mask = plan[3].long(), plan[4].long()

    def lookup(self, indices: Tensor) -> Tensor | None:
        """The rows of a few indices, none of them padding, or None."""
        if self._elements is None or indices.numel() > FEW or self._of_values.requires_grad:
            return None
        if not indices.is_cpu:
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
