"""Reloads what was written and compares it with what it was made of, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

from fairseq_dpq.fairseq_plugin.building import loads_in_fairseq
from fairseq_dpq.files.checkpoint import (
    Checkpoint,
    Progress,
    keys_of,
    stored_form,
    table_keys,
    training_layer,
)
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.forms.base import Form
from fairseq_dpq.layer import DPQEmbedding

_ROWS = 1 << 11  # rows handled at once: a few MB, so that they stay in cache


def check_written(state: dict[str, Any], written: Any, trust: bool = False) -> None:
    """Reload a written checkpoint, in fairseq too where it can, and compare every tensor with what
    should be there."""
    copy = Checkpoint.load(written, trust)
    copy.dpq_record()
    same = list(copy.weights) == list(state["model"]) and all(
        torch.equal(tensor, state["model"][key]) for key, tensor in copy.weights.items()
    )
    if not same:
        raise CheckpointError("verification failed: the written file differs from what was made")
    if not trust:
        loads_in_fairseq(written, copy.state.get("cfg"))


def verify(
    origin: Checkpoint,
    written: Path,
    progress: Progress | None = None,
    shown: Path | None = None,
    trust: bool = False,
) -> bool:
    """Reload a compact checkpoint and compare it with the training checkpoint, bit for bit.

    Whether fairseq has loaded it too, which takes the model's data; if it cannot, that is an error.

    Every row of every table is compared with what the training form gives in `eval()`, under each
    of its names, and every other tensor with its origin; float16 and bfloat16 with the rounded
    original.
    """
    copy_ = Checkpoint.load(written, trust)
    copy_.path = shown or written
    old = origin.dpq_record()
    try:
        new = copy_.dpq_record()
    except CheckpointError as error:
        raise CheckpointError(f"verification failed: {error}") from error
    if new.stage != "compact" or list(old.tables) != list(new.tables):
        raise _differs(copy_, "the record of its tables")
    for path, table in new.tables.items():
        layer = training_layer(origin, path, old.tables[path])
        module = stored_form(copy_, path, table)
        report = progress(f"verify {path}", table.num_embeddings) if progress is not None else None
        _compare_rows(copy_, path, layer, module, report)
        for alias in table.aliases:
            for key in keys_of(copy_.weights, [path]):
                twin = copy_.weights.get(alias + key[len(path) :])
                if twin is None or not _same_bits(twin, copy_.weights[key]):
                    raise _differs(copy_, f"{alias}, another name of {path},")
    skip = table_keys(origin.weights, new) | table_keys(copy_.weights, new)
    for key in [*origin.weights, *copy_.weights]:
        if key in skip:
            continue
        ours, theirs = copy_.weights.get(key), origin.weights.get(key)
        if ours is None or theirs is None or not _same_bits(ours, theirs.to(ours.dtype)):
            raise _differs(copy_, key)
    # What only --trust can load, fairseq refuses.
    return not trust and loads_in_fairseq(written, copy_.state.get("cfg"))


def _compare_rows(
    checkpoint: Checkpoint,
    path: str,
    layer: DPQEmbedding,
    module: Form,
    progress: Callable[[int], None] | None,
) -> None:
    with torch.no_grad():
        dtype = module(torch.zeros(0, dtype=torch.int64)).dtype
        rounded = module.computes_rows and dtype != torch.float32
        source = layer.compact(packed=True, dtype=dtype) if rounded else layer
        step = max(1, _ROWS * 1024 // max(1024, layer.embedding_dim))
        for start in range(0, layer.num_embeddings, step):
            rows = torch.arange(start, min(start + step, layer.num_embeddings))
            expected = source(rows).to(dtype)
            if not _same_bits(module(rows), expected):
                raise _differs(checkpoint, f"a row of {path} between {start} and {start + step}")
            if progress is not None:
                progress(rows.numel())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells 0.0 from -0.0 and takes NaN for equal to itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds.get(a.element_size()) if a.is_floating_point() else None
    if kind is not None and a.dim():
        a, b = a.contiguous().view(kind), b.contiguous().view(kind)
    return torch.equal(a, b)


def _differs(checkpoint: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"verification failed: {what} differs from the training checkpoint; {checkpoint.path} was "
        "not written. Please report this."
    )
