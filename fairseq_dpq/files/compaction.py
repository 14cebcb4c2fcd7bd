"""New checkpoints of old ones: trained tables in the form that inference uses, full tables in a
stored form or as a start of DPQ training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Hashable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.any_model.calibration import Use
from fairseq_dpq.any_model.compress import check_weight, knowledge, make_form, make_layer
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.configs import set_options, write_record
from fairseq_dpq.fairseq_plugin.options import PluginOptions, decoder_only
from fairseq_dpq.files.checkpoint import (
    Checkpoint,
    Progress,
    keys_of,
    named,
    separate,
    stored_bytes,
    table_keys,
    training_layer,
)
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.memory import identity, tensors_crc32
from fairseq_dpq.files.preparing import upgraded_cfg, upgraded_names
from fairseq_dpq.files.record import EXACT_KEY, Table, TablesRecord
from fairseq_dpq.files.tables import choose_tables, table_facts
from fairseq_dpq.forms import DEFAULT_FORM, FORMS
from fairseq_dpq.forms.base import Form, Settings
from fairseq_dpq.forms.quantization import HIGH_ERROR, reconstruction_error
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.marker import marked
from fairseq_dpq.methods.base import TableUse
from fairseq_dpq.sizes import default_D

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def compact_state(
    checkpoint: Checkpoint,
    *,
    source: str,
    values_dtype: str = "float32",
    half: bool = False,
    shrink: bool = False,
    exact_logits: bool = False,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The compact checkpoint, ready to be saved, and the facts about each table."""
    record = checkpoint.dpq_record()
    if record.stage == "compact":
        made_of = f" (made of {record.source})" if record.source else ""
        raise CheckpointError(f"{checkpoint.path} is compact already{made_of}")
    weights = checkpoint.weights
    dtype = DTYPES[values_dtype]
    dropped = table_keys(weights, record)
    rest = separate({key: value for key, value in weights.items() if key not in dropped})
    model = _half(checkpoint, rest) if half else rest
    new = TablesRecord({}, stage="compact", source=source)
    done = []
    for path, table in record.tables.items():
        layer = training_layer(checkpoint, path, table)
        _check_range(checkpoint, f"{path}.values", layer.values, dtype, "--values-dtype")
        report = progress(path, table.num_embeddings) if progress is not None else None
        form = layer.compact(packed=True, dtype=dtype, progress=report)
        form = form.shrunk() if shrink else form
        new.tables[path] = _put(model, path, table, form)
        facts = table_facts(path, table, form)
        facts["training_bytes"] = stored_bytes([weights[key] for key in keys_of(weights, [path])])
        facts["query_bytes"] = stored_bytes(layer.query)
        done.append({**facts, "stored_codes": form.code_sizes or None})
    return inference_state(checkpoint, model, new, exact_logits), done


def quantize_state(
    checkpoint: Checkpoint,
    options: PluginOptions,
    *,
    source: str,
    kind: str = DEFAULT_FORM,
    settings: Callable[[bool], Settings] | None = None,
    trainable: bool = False,
    seed: int = 0,
    exact_logits: bool = False,
    use_of: Callable[[str, int], Use | None] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A full checkpoint with tables that are stored as `kind`, or, with `trainable`, can be tuned;
    and the facts about each.

    `settings(decoder)` are those of the form for one table, the decoder's or another;
    `use_of(path, rows)` is how a table is used, for a form that takes that.
    """
    record = checkpoint.record()
    if record is not None:
        small = record.stage == "compact"
        hint = "it is compact" if small else "fairseq-dpq-compact makes it small"
        raise CheckpointError(f"{checkpoint.path} has DPQ tables already; {hint}")
    state = {**checkpoint.state, "model": upgraded_names(checkpoint.weights)}
    checkpoint = replace(checkpoint, state=state)
    weights = dict(checkpoint.weights)
    record = TablesRecord({}) if trainable else TablesRecord({}, stage="compact", source=source)
    done = []
    for found in choose_tables(checkpoint, options.embeddings):
        path, full = found.path, checkpoint.weights[f"{found.path}.weight"]
        d, decoder = full.shape[1], decoder_only(found.paths)
        tied = list(found.tied)
        table = Table(len(full), d, found.padding_idx, {}, found.paths[1:], tied)
        for name in [*found.paths, *tied]:
            del weights[f"{name}.weight"]
        try:
            check_weight(full)
            if trainable:
                config = options.of_table(decoder)
                config.validate(d, options.format(decoder), f"{path}.embedding_dim")
                use = TableUse(d, bool(tied), trained=True)
                table.options = config.resolved(use).keywords()
                wide = replace(found, weight=full.float())
                layer = make_layer(wide, table.options, seed, progress, path).eval()
                form = layer.compact(packed=True)
                record.tables[path] = _put(weights, path, table, layer)
            else:
                own = settings(decoder) if settings is not None else {}
                if "D" in own and own["D"] is None:
                    own["D"] = default_D(d, close=True)
                FORMS[kind].check(d, options.format(decoder), **own)
                takes = use_of if FORMS[kind].takes_use else None
                known = knowledge(found, None if takes is None else takes(path, len(full)))
                form = make_form(found, FORMS[kind], own, known, seed, progress)
                record.tables[path] = table = _put(weights, path, table, form)
        except DPQConfigError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        lost = reconstruction_error(full, form, table.padding_idx)
        better = form.improvement(full, seed) if lost > HIGH_ERROR else None
        facts = table_facts(path, table, form)
        facts["stored_bytes"], facts["relative_error"] = stored_bytes(full), lost
        done.append({**facts, "better": None if better is None else better._asdict()})
    new = inference_state(checkpoint, separate(weights), record, exact_logits)
    set_options(Checkpoint(checkpoint.path, new, 0).model_cfg, options.to_keys())
    return new, done


def _put(weights: dict[str, Tensor], path: str, table: Table, module: Form | DPQEmbedding) -> Table:
    """Put a table's tensors into a state_dict under all its names, so that torch stores them once;
    its entry in the record."""
    tensors = separate(module.state_dict())
    for name in named(path, table):
        weights.update({f"{name}.{key}": tensor for key, tensor in tensors.items()})
    if not isinstance(module, Form):
        return table
    settings = {"kind": module.kind, **module.settings()}
    return replace(table, form=settings, checksums=tensors_crc32(tensors))


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
    cast: dict[Hashable, Tensor] = {}
    out = {}
    for key, tensor in weights.items():
        # fairseq never sets `_float_tensor`, which only carries a dtype: it may hold anything
        unset = key.split(".")[-1] == "_float_tensor"
        if tensor.dtype in (torch.float32, torch.float64, torch.bfloat16) and not unset:
            if identity(tensor) not in cast:
                _check_range(checkpoint, key, tensor, torch.float16, "--half")
                cast[identity(tensor)] = tensor.half()
            tensor = cast[identity(tensor)]
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
