"""Scalar quantisation: each number of a table in b bits, uniform between a smallest and a largest
number of its row or of the whole table. The paper's baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, ClassVar, Mapping

import torch
from torch import Tensor

from fairseq_dpq.forms.base import (
    CRC_BITS,
    ChecksummedForm,
    FormOption,
    Layout,
    Settings,
)
from fairseq_dpq.forms.packing import (
    check_spare_bits,
    even_width,
    pack_codes,
    row_bytes,
    unpack_even,
    unpack_plan,
    unpack_rows,
)

_ROWS = 1 << 13


class ScalarEmbedding(ChecksummedForm):
    """Looks rows up as nn.Embedding does, from packed levels: row = offset + level * scale.

    `levels` (n, bytes) are packed like product codes; `scale` and `offset` are (n, 1), or (1, 1)
    for one range of the whole table. `levels_crc32` (32,) tells damage.
    """

    kind = "scalar"
    mark = "levels"
    packed_tensors = ("levels",)
    options = (
        FormOption("bits", "--bits", 8, "bits of each number, 2 to 8"),
        FormOption("by_row", "--by-table", True, "one range for the table, not one for each row"),
    )
    setting_types: ClassVar[dict[str, type]] = {"bits": int, "by_row": bool}

    if TYPE_CHECKING:  # TorchScript cannot read annotations that are strings
        levels: Tensor
        scale: Tensor
        offset: Tensor
        plan: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        bits: int,
        by_row: bool = True,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if not 2 <= bits <= 8:
            raise ValueError(f"bits={bits}: must be from 2 to 8")
        self._set_size(num_embeddings, embedding_dim, padding_idx)
        self.bits = bits
        self.by_row = by_row
        widths = [bits] * embedding_dim
        self.even = even_width(widths)
        ranges = num_embeddings if by_row else 1
        levels = torch.zeros(num_embeddings, row_bytes(widths), dtype=torch.uint8, device=device)
        self.register_buffer("levels", levels)
        for name in ("scale", "offset"):
            self.register_buffer(name, torch.zeros(ranges, 1, dtype=dtype, device=device))
        self.register_buffer("plan", unpack_plan(widths).to(levels.device), persistent=False)

    @classmethod
    @torch.no_grad()
    def from_table(  # type: ignore[override]
        cls,
        table: Tensor,
        padding_idx: int | None = None,
        *,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
        bits: int = 8,
        by_row: bool = True,
    ) -> ScalarEmbedding:
        """Each number rounded to the nearest of 2^bits levels."""
        n, d = table.shape
        module = cls(n, d, padding_idx, bits=bits, by_row=by_row, device=table.device)
        real = torch.ones(n, dtype=torch.bool, device=table.device)
        if module.padding_idx is not None:
            real[module.padding_idx] = False
        if by_row:
            low, high = table.float().amin(1, keepdim=True), table.float().amax(1, keepdim=True)
        else:
            some = table[real] if bool(real.any()) else table
            low, high = some.float().amin().view(1, 1), some.float().amax().view(1, 1)
        module.offset.copy_(low)
        module.scale.copy_((high - low) / (2**bits - 1))
        widths = [bits] * d
        for start in range(0, n, _ROWS):
            rows = table[start : start + _ROWS].float()
            part = slice(start, start + _ROWS) if by_row else slice(None)
            step = module.scale[part].clamp_min(1e-30)
            level = ((rows - module.offset[part]) / step).round_().clamp_(0, 2**bits - 1)
            level[~real[start : start + _ROWS]] = 0
            module.levels[start : start + _ROWS] = pack_codes(level.to(torch.int16), widths)
        if progress is not None:
            progress(1)
        return module

    @classmethod
    def layout(
        cls, num_embeddings: int, embedding_dim: int, settings: Settings, found: Mapping[str, Any]
    ) -> dict[str, Layout]:
        bits = settings["bits"]
        if not 2 <= bits <= 8:
            raise ValueError(f"bits={bits}: must be from 2 to 8")
        ranges = Layout((num_embeddings if settings["by_row"] else 1, 1))
        return {
            "levels": Layout((num_embeddings, (bits * embedding_dim + 7) // 8), (torch.uint8,)),
            "levels_crc32": Layout((CRC_BITS,), (torch.bool,), optional=True),
            "scale": ranges,
            "offset": ranges,
        }

    @classmethod
    def check_contents(
        cls, embedding_dim: int, settings: Settings, tensors: Mapping[str, Tensor]
    ) -> None:
        check_spare_bits("levels", tensors["levels"], settings["bits"] * embedding_dim)

    @classmethod
    def from_tensors(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        settings: Settings,
        tensors: Mapping[str, Tensor],
    ) -> ScalarEmbedding:
        bits, by_row = settings["bits"], settings["by_row"]
        dtype = tensors["scale"].dtype
        module = cls(1, embedding_dim, None, bits=bits, by_row=by_row, dtype=dtype)
        for name in ("levels", "scale", "offset"):
            setattr(module, name, tensors[name])
        module._set_size(num_embeddings, embedding_dim, padding_idx)
        return module.eval()

    def forward(self, indices: Tensor) -> Tensor:
        flat = indices.reshape(-1)
        level = _unpack(self.levels.index_select(0, flat), self.plan, self.even, self.embedding_dim)
        if self.by_row:
            scale, offset = self.scale.index_select(0, flat), self.offset.index_select(0, flat)
        else:
            scale, offset = self.scale, self.offset
        out = level.to(torch.float32) * scale.float() + offset.float()
        if self.padding_idx is not None:
            out = out.masked_fill((flat == self.padding_idx).unsqueeze(-1), 0.0)
        return out.to(self.scale.dtype).view(indices.shape + (self.embedding_dim,))  # noqa: RUF005

    def settings(self) -> Settings:
        return {"bits": self.bits, "by_row": self.by_row}

    def formula_bits(self) -> int:
        return self.num_embeddings * self.embedding_dim * self.bits + 64 * self.scale.shape[0]

    @property
    def saved_nbytes(self) -> int:
        ranges = 2 * self.scale.numel() * self.scale.element_size()
        return self.levels.numel() + ranges + CRC_BITS

    def bits_per_symbol(self) -> int:
        own = 16 * self.scale.element_size() if self.by_row else 0
        return self.bits * self.embedding_dim + own

    def describe(self) -> str:
        return f"{self.bits} bits by {'row' if self.by_row else 'table'}"


def _unpack(rows: Tensor, plan: Tensor, even: int, width: int) -> Tensor:
    if torch.jit.is_scripting():
        return unpack_rows(rows, plan, False)
    else:  # a saved TorchScript program takes the dtype of a view for its shape
        return unpack_even(rows, even, width) if even else unpack_rows(rows, plan, False)
