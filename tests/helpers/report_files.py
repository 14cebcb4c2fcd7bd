"""Files for reports: exported tables with planted codes, and full checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor

from fairseq_dpq.files.record import RECORD_KEY
from fairseq_dpq.files.writer import write_form
from fairseq_dpq.forms.product_codes import CompactEmbedding
from helpers.toy_checkpoints import PATH, make_layer, make_state


def exported(
    path: Path,
    codes: Tensor,
    values: Tensor,
    symbols: Sequence[str] | None = None,
    padding_idx: int | None = None,
) -> Path:
    """A file of fairseq-dpq-export with these codes (n, D) and values (G, K, d/D)."""
    d = codes.shape[1] * values.shape[-1]
    form = CompactEmbedding.from_codes(codes, values, d, padding_idx, packed=True)
    write_form(path, form, PATH, None if symbols is None else list(symbols), force=True)
    return path


def full(path: Path, table: Tensor, **more: Any) -> Path:
    """A checkpoint without DPQ."""
    state = make_state(make_layer(), **more)
    delattr(state["cfg"]["model"], RECORD_KEY)
    state["model"] = {f"{PATH}.weight": table, "decoder.fc.weight": torch.zeros(2, 3)}
    torch.save(state, path)
    return path


def dictionary(path: Path, words: Sequence[str]) -> Path:
    """A fairseq dictionary of these words; fairseq puts its four own symbols before them."""
    path.write_text("".join(f"{word} 1\n" for word in words), encoding="utf-8")
    return path
