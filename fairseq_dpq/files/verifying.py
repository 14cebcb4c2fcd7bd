"""Reloads what was written and compares it with what it was made of, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_dpq.fairseq_plugin.building import loads_in_fairseq
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.progress import bar
from fairseq_dpq.forms.base import Form
from fairseq_dpq.layer import DPQEmbedding

_ROWS = 1 << 11  # rows handled at once: a few MB, so that they stay in cache


def check_written(state: dict[str, Any], written: Path, trust: bool = False) -> None:
    """Reload a written checkpoint, in fairseq too where it can, and compare every tensor with what
    should be there."""
    copy = _reload(written, trust)
    same = list(copy.weights) == list(state["model"]) and all(
        torch.equal(tensor, state["model"][key]) for key, tensor in copy.weights.items()
    )
    if not same:
        raise CheckpointError("verification failed: the written file differs from what was made")
    if not trust:
        loads_in_fairseq(written, copy.state.get("cfg"))


def verify(origin: Checkpoint, written: Path, trust: bool = False) -> bool:
    """Reload a compact checkpoint and compare it with the training checkpoint, bit for bit.

    Whether fairseq has loaded it too, which takes the model's data; if it cannot, that is an error.

    Every row of every table is compared with what the training form gives in `eval()`, and every
    other tensor with its origin; float16 and bfloat16 with the rounded original. That all names of
    a table have the same tensors is part of every load.
    """
    copy = _reload(written, trust)
    record = copy.dpq_record()
    if record.stage != "compact" or list(origin.dpq_record().tables) != list(record.tables):
        raise _differs("the record of its tables")
    for path in record.tables:
        _compare_rows(path, origin.layer(path), copy.form(path))
    inside = tuple(f"{name}." for name in record.names())
    for key in {**origin.weights, **copy.weights}:
        ours, theirs = copy.weights.get(key), origin.weights.get(key)
        if key.startswith(inside):
            continue
        if ours is None or theirs is None or not _same_bits(ours, theirs.to(ours.dtype)):
            raise _differs(key)
    # What only --trust can load, fairseq refuses.
    return not trust and loads_in_fairseq(written, copy.state.get("cfg"))


def _reload(written: Path, trust: bool) -> Checkpoint:
    copy = Checkpoint.load(written, trust)
    try:
        copy.dpq_record()
    except CheckpointError as error:
        raise CheckpointError(f"verification failed: {error}") from error
    return copy


def _compare_rows(path: str, layer: DPQEmbedding, form: Form) -> None:
    dtype = form(torch.zeros(0, dtype=torch.int64)).dtype
    rounded = form.computes_rows and dtype != torch.float32
    source = layer.compact(packed=True, dtype=dtype) if rounded else layer
    step = max(1, _ROWS * 1024 // max(1024, layer.embedding_dim))
    with torch.no_grad(), bar(f"verify {path}", layer.num_embeddings) as done:
        for rows in torch.arange(layer.num_embeddings).split(step):
            if not _same_bits(form(rows), source(rows).to(dtype)):
                raise _differs(f"a row of {path} between {int(rows[0])} and {int(rows[-1])}")
            done.update(len(rows))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells 0.0 from -0.0 and takes NaN for equal to itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size(), a.dtype)
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def _differs(what: str) -> CheckpointError:
    return CheckpointError(
        f"verification failed: {what} differs from the training checkpoint; nothing was written. "
        "Please report this."
    )
