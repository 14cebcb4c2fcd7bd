"""New checkpoints of old ones: trained tables in the form that inference uses, full tables in a
stored form or as a start of DPQ training. What was written is reloaded and compared with what it
was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.any_model.calibration import Use
from fairseq_dpq.any_model.compress import check_weight, knowledge, make_form, make_layer
from fairseq_dpq.config import DPQConfigError, Format, flag
from fairseq_dpq.fairseq_plugin.building import loads_in_fairseq
from fairseq_dpq.fairseq_plugin.configs import set_options, write_record
from fairseq_dpq.fairseq_plugin.options import PluginOptions, decoder_only
from fairseq_dpq.files.checkpoint import Checkpoint, each_once, keys_of, separate, stored_bytes
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.memory import tensors_crc32
from fairseq_dpq.files.preparing import upgraded_cfg, upgraded_names
from fairseq_dpq.files.progress import bar, steps
from fairseq_dpq.files.record import EXACT_KEY, Table, TablesRecord
from fairseq_dpq.files.tables import choose_tables, table_facts
from fairseq_dpq.forms import DEFAULT_FORM, FORMS
from fairseq_dpq.forms.base import Form, Settings
from fairseq_dpq.forms.quantization import HIGH_ERROR, reconstruction_error
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.marker import marked
from fairseq_dpq.methods.base import TableUse
from fairseq_dpq.model import EmbeddingTable
from fairseq_dpq.sizes import default_D

_ROWS = 1 << 11  # rows compared at once: a few MB, so that they stay in cache
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def compact_state(
    checkpoint: Checkpoint,
    *,
    source: str,
    values_dtype: str = "float32",
    half: bool = False,
    shrink: bool = False,
    exact_logits: bool = False,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The compact checkpoint, ready to be saved, and the facts about each table."""
    record = checkpoint.dpq_record()
    if record.stage == "compact":
        made_of = f" (made of {record.source})" if record.source else ""
        raise CheckpointError(f"{checkpoint.path} is compact already{made_of}")
    weights, dtype = checkpoint.weights, DTYPES[values_dtype]
    dropped = set(keys_of(weights, record.names()))
    model = separate({key: value for key, value in weights.items() if key not in dropped})
    if half:
        model = each_once(model, lambda key, tensor: _half(checkpoint, key, tensor))
    new = TablesRecord({}, stage="compact", source=source)
    done = []
    for path, table in record.tables.items():
        key = f"{path}.values"
        _check_range(checkpoint, key, weights[key], dtype, "--values-dtype")
        form = checkpoint.form(path, dtype)
        form = form.shrunk() if shrink else form
        new.tables[path] = _put(model, path, table, form)
        facts = table_facts(path, table, form)
        facts["training_bytes"] = checkpoint.table_bytes(path)
        facts["query_bytes"] = stored_bytes(weights[f"{path}.query"])
        done.append({**facts, "stored_codes": form.code_sizes or None})
    return inference_state(checkpoint, model, new, exact_logits), done


def quantize_state(
    checkpoint: Checkpoint,
    options: PluginOptions,
    *,
    source: str,
    kind: str = DEFAULT_FORM,
    settings: Callable[[bool], Settings] = lambda decoder: {},
    trainable: bool = False,
    seed: int = 0,
    exact_logits: bool = False,
    use_of: Callable[[str, int], Use | None] = lambda path, rows: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A full checkpoint with tables that are stored as `kind`, or, with `trainable`, can be tuned;
    and the facts about each.

    `settings(decoder)` are those of the form for one table, the decoder's or another;
    `use_of(path, rows)` is how a table is used, for a form that takes that.
    """
    if checkpoint.record is not None:
        small = checkpoint.record.stage == "compact"
        hint = "it is compact" if small else "fairseq-dpq-compact makes it small"
        raise CheckpointError(f"{checkpoint.path} has DPQ tables already; {hint}")
    checkpoint = checkpoint.with_weights(upgraded_names(checkpoint.weights))
    weights = dict(checkpoint.weights)
    record = TablesRecord({}) if trainable else TablesRecord({}, stage="compact", source=source)

    def stored(found: EmbeddingTable, full: Tensor) -> Form:
        own = settings(decoder_only(found.paths))
        if "D" in own and own["D"] is None:
            own["D"] = default_D(full.shape[1], close=True)
        FORMS[kind].check(full.shape[1], _named(kind, options, decoder_only(found.paths)), **own)
        use = use_of(found.path, len(full)) if FORMS[kind].takes_use else None
        return make_form(found, FORMS[kind], own, knowledge(found, use), seed, steps)

    def learned(found: EmbeddingTable, full: Tensor, table: Table) -> DPQEmbedding:
        d, decoder = table.embedding_dim, decoder_only(found.paths)
        config = options.of_table(decoder)
        said = options.format(decoder), f"{found.path}.embedding_dim"
        config.validate(d, *said)
        config = config.resolved(TableUse(d, bool(table.tied), trained=True))
        config.validate(d, *said)  # what was given may not go with what the method has chosen
        table.options = config.keywords()
        wide = replace(found, weight=full.float())
        return make_layer(wide, table.options, seed, steps, found.path).eval()

    done = []
    for found in choose_tables(checkpoint, options.embeddings):
        path, full = found.path, checkpoint.weights[f"{found.path}.weight"]
        table = Table(len(full), full.shape[1], found.padding_idx, {}, found.paths[1:])
        table.tied = list(found.tied)
        for name in [*found.paths, *found.tied]:
            del weights[f"{name}.weight"]
        try:
            check_weight(full)
            module = learned(found, full, table) if trainable else stored(found, full)
        except DPQConfigError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        record.tables[path] = table = _put(weights, path, table, module)
        form = module if isinstance(module, Form) else module.compact(packed=True)
        lost = reconstruction_error(full, form, table.padding_idx)
        better = form.improvement(full, seed) if lost > HIGH_ERROR else None
        facts = table_facts(path, table, form)
        facts["stored_bytes"], facts["relative_error"] = stored_bytes(full), lost
        done.append({**facts, "better": None if better is None else better._asdict()})
    new = inference_state(checkpoint, separate(weights), record, exact_logits)
    set_options(new["cfg"]["model"], options.to_keys())
    return new, done


def _named(kind: str, options: PluginOptions, decoder: bool) -> Format:
    """How errors name the settings of a form: by its own flags, or by those of the plugin."""
    flags, other = {o.keyword: o.flag for o in FORMS[kind].options}, options.format(decoder)

    def named(name: str, value: Any) -> str:
        own = flags.get(name, flag(name))
        return other(name, value) if own == flag(name) else f"{own} {value}"

    return named


def _put(weights: dict[str, Tensor], path: str, table: Table, module: Form | DPQEmbedding) -> Table:
    """Put a table's tensors into a state_dict under all its names, so that torch stores them once;
    its entry in the record."""
    tensors = separate(module.state_dict())
    for name in (path, *table.aliases):
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
    old, cfg = checkpoint.state, upgraded_cfg(checkpoint)
    history = (old.get("optimizer_history") or [{}])[-1]
    if not isinstance(history, Mapping):
        raise CheckpointError(f"{checkpoint.path}: its optimizer_history is not a list of dicts")
    last = {
        "criterion_name": history.get("criterion_name", "CrossEntropyCriterion"),
        "optimizer_name": history.get("optimizer_name", "FairseqAdam"),
        "lr_scheduler_state": {},
        "num_updates": history.get("num_updates", 0),
    }
    write_record(cfg["model"], record)
    if record.stage == "compact":
        set_options(cfg["model"], {EXACT_KEY: exact_logits})
    state: dict[str, Any] = {"args": None, "cfg": cfg, "model": model, "optimizer_history": [last]}
    return marked({**state, "task_state": old.get("task_state") or {}, "extra_state": {}})


def _half(checkpoint: Checkpoint, key: str, tensor: Tensor) -> Tensor:
    """A floating-point tensor in float16."""
    # fairseq never sets `_float_tensor`, which only carries a dtype: it may hold anything
    unset = key.split(".")[-1] == "_float_tensor"
    if unset or tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return tensor
    _check_range(checkpoint, key, tensor, torch.float16, "--half")
    return tensor.half()


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


# Verification -------------------------------------------------------------------------------------


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
