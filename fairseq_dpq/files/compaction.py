"""From training form to compact form: codes in bounded memory, values kept, the rest dropped.
`compact_state` makes the new checkpoint, `verify` compares a written one with its origin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.fairseq_plugin.configs import set_options, write_record
from fairseq_dpq.fairseq_plugin.load_check import loads_in_fairseq
from fairseq_dpq.files.checkpoint import (
    Checkpoint,
    keys_of,
    named,
    separate,
    stored_bytes,
    stored_form,
    training_layer,
)
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.memory import tensors_crc32
from fairseq_dpq.files.record import EXACT_KEY, Table, TablesRecord
from fairseq_dpq.files.upgrading import upgraded_cfg
from fairseq_dpq.forms.base import Form
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.marker import marked

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ROWS = 1 << 11  # rows handled at once: a few MB, so that they stay in cache

Progress = Callable[[str, int], Callable[[int], None]]  # (what, total) -> report of work done


@dataclass
class Compacted:
    """What became of one table."""

    path: str
    table: Table
    before: int  # bytes in the training form
    query: int  # bytes of the query matrix among them
    after: int
    form: Form
    used: Tensor | None  # (D,) codes in use in each group, of a form with codes


def compact_layer(
    layer: DPQEmbedding,
    dtype: torch.dtype = torch.float32,
    shrink: bool = False,
    progress: Callable[[int], None] | None = None,
) -> tuple[Form, Tensor | None]:
    """The inference form of a layer, and the number of codes in use in each group."""
    module = layer.compact(packed=True, dtype=dtype, progress=progress)
    usage = module.codes_in_use()
    module = module.shrunk() if shrink else module
    return module, None if usage is None else usage["used"]


def compact_state(
    checkpoint: Checkpoint,
    *,
    source: str,
    values_dtype: str = "float32",
    half: bool = False,
    shrink: bool = False,
    exact_logits: bool = False,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[Compacted]]:
    """The compact checkpoint, ready to be saved, and a report on each table."""
    record = checkpoint.dpq_record()
    if record.stage == "compact":
        made_of = f" (made of {record.source})" if record.source else ""
        raise CheckpointError(f"{checkpoint.path} is compact already{made_of}")
    weights = checkpoint.weights
    dtype = DTYPES[values_dtype]
    dpq = [name for path, table in record.tables.items() for name in named(path, table)]
    dropped = set(keys_of(weights, dpq))
    rest = separate({key: value for key, value in weights.items() if key not in dropped})
    model = _half(checkpoint, rest) if half else rest
    done = []
    for path, table in record.tables.items():
        layer = training_layer(checkpoint, path, table)
        _check_range(checkpoint, f"{path}.values", layer.values, dtype, "--values-dtype")
        report = progress(path, table.num_embeddings) if progress is not None else None
        module, used = compact_layer(layer, dtype, shrink, report)
        state = separate(module.state_dict())
        for name in named(path, table):  # the same tensors: torch stores them once
            model.update({f"{name}.{key}": value for key, value in state.items()})
        mine = [weights[key] for key in keys_of(weights, [path])]
        done.append(
            Compacted(
                path=path,
                table=table,
                before=stored_bytes(mine),
                query=stored_bytes(layer.query),
                after=stored_bytes(state),
                form=module,
                used=used,
            )
        )
    tables = {item.path: stored_table(item.table, item.form) for item in done}
    new = TablesRecord(tables, stage="compact", source=source)
    return inference_state(checkpoint, model, new, exact_logits), done


def stored_table(table: Table, form: Form) -> Table:
    """The record of a table in a stored form, with the checksums of its tensors."""
    settings = {"kind": form.kind, **form.settings()}
    return replace(table, form=settings, checksums=tensors_crc32(form.state_dict()))


def inference_state(
    checkpoint: Checkpoint,
    model: dict[str, Tensor],
    record: TablesRecord,
    exact_logits: bool = False,
) -> dict[str, Any]:
    """A checkpoint with nothing but what fairseq needs to load a model for inference.

    `exact_logits` is a key of the config, so that fairseq's `--model-overrides` can change it.
    """
    old = checkpoint.state
    state: dict[str, Any] = {"args": None, "cfg": upgraded_cfg(checkpoint), "model": model}
    history = old.get("optimizer_history") or [{}]
    if not isinstance(history, list) or not isinstance(history[-1], Mapping):
        raise CheckpointError(f"{checkpoint.path}: its optimizer_history is not a list of dicts")
    state["optimizer_history"] = [
        {
            "criterion_name": history[-1].get("criterion_name", "CrossEntropyCriterion"),
            "optimizer_name": history[-1].get("optimizer_name", "FairseqAdam"),
            "lr_scheduler_state": {},
            "num_updates": history[-1].get("num_updates", 0),
        }
    ]
    state["task_state"] = old.get("task_state") or {}
    state["extra_state"] = {}
    cfg = Checkpoint(checkpoint.path, state, 0).model_cfg
    write_record(cfg, record)
    if record.stage == "compact":
        set_options(cfg, {EXACT_KEY: exact_logits})
    return marked(state)


def _half(checkpoint: Checkpoint, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Floating-point tensors in float16; what was shared stays shared."""
    cast: dict[tuple[Any, ...], Tensor] = {}
    out = {}
    for key, tensor in weights.items():
        # fairseq never sets `_float_tensor`, which only carries a dtype: it may hold anything
        unset = key.split(".")[-1] == "_float_tensor"
        if tensor.dtype in (torch.float32, torch.float64, torch.bfloat16) and not unset:
            same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if same not in cast:
                _check_range(checkpoint, key, tensor, torch.float16, "--half")
                cast[same] = tensor.half()
            tensor = cast[same]
        out[key] = tensor
    return out


def _check_range(
    checkpoint: Checkpoint, key: str, tensor: Tensor, dtype: torch.dtype, flag: str
) -> None:
    largest = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
    limit = torch.finfo(dtype).max
    if limit < largest < float("inf"):
        better = "use --values-dtype bfloat16" if flag == "--values-dtype" else "leave --half out"
        raise CheckpointError(
            f"{checkpoint.path}: {key} reaches {largest:g}, beyond {flag} float16's {limit:g}; "
            f"{better}"
        )


# Verification ------------------------------------------------------------------------------------


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
    dpq = [name for path, table in new.tables.items() for name in named(path, table)]
    skip = {*keys_of(origin.weights, dpq), *keys_of(copy_.weights, dpq)}
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
