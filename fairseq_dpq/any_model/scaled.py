"""Tables whose rows are multiplied by a number as they are looked up, as mBART, NLLB and Gemma of
Hugging Face have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Scale(NamedTuple):
    """What rows are multiplied by."""

    number: float
    rounded: bool  # to the dtype of the rows first


class ScaledEmbedding(nn.Module):
    """Rows of a table times a number. `weight` is the table without that number, as a tied output
    layer uses it."""

    def __init__(self, table: nn.Module, scale: Scale) -> None:
        super().__init__()
        self.table: Any = table
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        rows = self.table(indices)
        number, rounded = self.scale
        if rounded:
            return rows * torch.full((), number, dtype=rows.dtype, device=rows.device)
        return rows * number

    def extra_repr(self) -> str:
        return f"scale={self.scale.number:g}"


def scale_of(module: nn.Module) -> Scale | None:
    """The scale of an nn.Embedding that only multiplies its rows by one; None for any other."""
    kept = getattr(module, "scalar_embed_scale", None)
    number = kept if kept is not None else getattr(module, "embed_scale", None)
    if not isinstance(number, (int, float)) or not isinstance(module, nn.Embedding):
        return None
    scale = Scale(float(number), kept is not None)
    return scale if module.weight.device.type == "meta" or _only_scales(module, scale) else None


@torch.no_grad()
def _only_scales(module: nn.Embedding, scale: Scale) -> bool:
    """Whether the module computes what `ScaledEmbedding` would, by a few of its rows."""
    last = module.num_embeddings - 1
    rows = torch.tensor([[0, last // 2], [last // 3, last]], device=module.weight.device)
    plain = nn.Embedding.from_pretrained(module.weight)
    try:
        found = type(module).forward(module, rows)  # past its hooks
    except Exception:  # it takes other arguments, and may do anything with these
        return False
    return isinstance(found, Tensor) and torch.equal(found, ScaledEmbedding(plain, scale)(rows))
