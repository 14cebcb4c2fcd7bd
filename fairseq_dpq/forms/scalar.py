"""Scalar quantisation: each number of a table in b bits, uniform between a smallest and a largest
number of its row, of a group in it, or of the whole table. The paper's baseline, and its peers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_dpq.forms import packing
from fairseq_dpq.forms.base import Form, FormOption, Layout, Say, Settings, Tensors
from fairseq_dpq.forms.lookup import unpack
from fairseq_dpq.training.initialization import Trained

_ROWS = 1 << 13


class ScalarEmbedding(Form):
    """Looks rows up as nn.Embedding does, from packed levels: row = offset + level * scale.

    `levels` (n, bytes) are packed like product codes; `scale` and `offset` are (n, 1), or (1, 1)
    for one range of the whole table. With `group` each group of so many numbers of a row has a
    range of its own, as torchao and GGUF have it: (n, groups) numbers that stay float16 whatever
    the dtype of the model; that of `like` (1,) is the model's.
    """

    kind = "scalar"
    signature_tensor = "levels"
    options = (
        FormOption("bits", "--bits", 8, "bits of each number, 2 to 8"),
        FormOption("by_row", "--by-table", True, "one range for the table, not one for each row"),
        FormOption("group", "--group", 0, "numbers with a range of their own, e.g. 32; 0: a row"),
    )
    setting_types: ClassVar[dict[str, type]] = {"bits": int, "by_row": bool, "group": int}

    if TYPE_CHECKING:  # TorchScript cannot read annotations that are strings
        levels: Tensor
        scale: Tensor
        offset: Tensor
        plan: Tensor
        like: Tensor | None

    def build(  # type: ignore[override]
        self, make: Settings, *, bits: int, by_row: bool = True, group: int = 0
    ) -> None:
        n, d = self.num_embeddings, self.embedding_dim
        self.require(d, bits=bits, by_row=by_row, group=group)
        self.bits, self.by_row, self.group = bits, by_row, group
        widths = [bits] * d
        self.even = packing.even_width(widths)
        levels = torch.zeros(n, packing.row_bytes(widths), dtype=torch.uint8, device=make["device"])
        self.register_buffer("levels", levels)
        ranges = (n if by_row else 1, d // group if group else 1)
        kept = {**make, "dtype": torch.float16} if group else make
        for name in ("scale", "offset"):
            self.register_buffer(name, torch.zeros(ranges, **kept))
        self.register_buffer("like", torch.zeros(1, **make) if group else None)
        self.register_buffer(
            "plan", packing.unpack_plan(widths).to(levels.device), persistent=False
        )

    @classmethod
    def of_table(  # type: ignore[override]
        cls,
        trained: Trained,
        padding_idx: int | None,
        bits: int = 8,
        by_row: bool = True,
        group: int = 0,
    ) -> ScalarEmbedding:
        """Each number rounded to the nearest of 2^bits levels."""
        (n, d), table, real = trained.table.shape, trained.table, trained.real
        settings: Settings = {"bits": bits, "by_row": by_row, "group": group}
        module = cls(n, d, padding_idx, **settings, device=table.device)
        top = 2**bits - 1
        if not by_row:
            low, high = table[real].float().amin(), table[real].float().amax()
            module.offset.fill_(low)
            module.scale.copy_((high - low) / top)
        for start in range(0, n, _ROWS):
            part = slice(start, start + _ROWS)
            own = part if by_row else slice(None)
            rows = table[part].float().view(-1, module.scale.shape[1], group or d)
            if by_row:
                module.offset[part] = rows.amin(2)
                module.scale[part] = (rows.amax(2) - module.offset[part]) / top
            offset, scale = (x[own].float().unsqueeze(2) for x in (module.offset, module.scale))
            level = ((rows - offset) / scale.clamp_min(1e-30)).round_().clamp_(0, top)
            level[~real[part]] = 0
            module.levels[part] = packing.pack_codes(level.flatten(1).to(torch.int16), [bits] * d)
        return module

    @classmethod
    def check(cls, embedding_dim: int, say: Say, **settings: Any) -> None:
        bits, group = settings["bits"], settings.get("group", 0)
        if not 2 <= bits <= 8:
            raise ValueError(f"{say('bits', bits)}: must be from 2 to 8")
        if group < 0 or (group and embedding_dim % group):
            raise ValueError(
                f"{say('group', group)} does not divide the embedding size {embedding_dim}; try 32"
            )
        if group and not settings.get("by_row", True):
            raise ValueError(f"{say('group', group)} goes without one range for the whole table")

    @classmethod
    def layout(cls, n: int, d: int, settings: Settings, found: Tensors) -> dict[str, Layout]:
        cls.require(d, **settings)
        bits, group = settings["bits"], settings["group"]
        ranges = Layout((n if settings["by_row"] else 1, d // group if group else 1))
        levels = Layout((n, (bits * d + 7) // 8), (torch.uint8,))
        like = {"like": Layout((1,))} if group else {}
        return {"levels": levels, "scale": ranges, "offset": ranges, **like}

    @classmethod
    def check_contents(cls, d: int, settings: Settings, tensors: Tensors) -> None:
        packing.check_spare_bits("levels", tensors["levels"], settings["bits"] * d)

    def forward(self, indices: Tensor) -> Tensor:
        flat = indices.reshape(-1)
        level = self.levels.index_select(0, flat)
        level = unpack(level, self.plan, False, self.even, self.embedding_dim)
        if self.by_row:
            scale, offset = self.scale.index_select(0, flat), self.offset.index_select(0, flat)
        else:
            scale, offset = self.scale, self.offset
        dtype = self.scale.dtype
        if self.like is not None:
            dtype = self.like.dtype
            scale = scale.repeat_interleave(self.group, 1)
            offset = offset.repeat_interleave(self.group, 1)
        out = level.to(torch.float32) * scale.float() + offset.float()
        if self.padding_idx is not None:
            out = out.masked_fill((flat == self.padding_idx).unsqueeze(-1), 0.0)
        return out.to(dtype).view(indices.shape + (self.embedding_dim,))  # noqa: RUF005

    def with_rows(self, rows: Tensor) -> Form:
        if not self.by_row:  # the range of the table may not hold them
            return super().with_rows(rows)
        new = self.from_table(rows.to(self.levels.device), **self.settings()).to(self.scale.dtype)
        joined = dict(self.named_buffers())
        for name in ("levels", "scale", "offset"):
            joined[name] = torch.cat([joined[name], new.get_buffer(name)])
        size = (self.num_embeddings + len(rows), self.embedding_dim, self.padding_idx)
        return self.from_tensors(*size, self.settings(), joined)

    def _kept_dtypes(self) -> list[tuple[nn.Module, str]]:
        return [(self, "scale"), (self, "offset")] if self.group else []

    @classmethod
    def from_tensors(
        cls, n: int, d: int, padding_idx: int | None, settings: Settings, tensors: Tensors
    ) -> Form:
        if settings["group"]:  # a reader may have turned all numbers into the dtype of the model
            tensors = {k: t.half() if k in ("scale", "offset") else t for k, t in tensors.items()}
        return super().from_tensors(n, d, padding_idx, settings, tensors)

    def formula_bits(self) -> int:
        ranges = (32 if self.group else 64) * self.scale.numel()
        return self.num_embeddings * self.embedding_dim * self.bits + ranges

    def bits_per_symbol(self) -> int:
        own = 16 * self.scale.element_size() * self.scale.shape[1] if self.by_row else 0
        return self.bits * self.embedding_dim + own

    def describe(self) -> str:
        if self.group:
            return f"{self.bits} bits in groups of {self.group}"
        return f"{self.bits} bits by {'row' if self.by_row else 'table'}"
