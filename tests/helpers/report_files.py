"""Files for reports: exported tables with planted codes, and full checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor

from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.record import RECORD_KEY
from fairseq_dpq.safetensors_file import metadata, symbols_tensor
from helpers.toy_checkpoints import PATH, make_layer, make_state


def exported(
    path: Path,
    codes: Tensor,
    values: Tensor,
    symbols: Sequence[str] | None = None,
    padding_idx: int | None = None,
) -> Path:
    """A file of fairseq-dpq-export with these codes (n, D) and values (G, K, d/D)."""
    from safetensors.torch import save_file

    d = codes.shape[1] * values.shape[-1]
    form = CompactEmbedding.from_codes(codes, values, d, padding_idx, packed=True)
    tensors = form.export_tensors()
    if symbols is not None:
        tensors["symbols"] = symbols_tensor(list(symbols))
    config: dict[str, Any] = {"kind": form.kind, "num_embeddings": len(codes)}
    config.update(embedding_dim=d, padding_idx=padding_idx, **form.settings())
    save_file(tensors, str(path), metadata(PATH, config, tensors))
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
