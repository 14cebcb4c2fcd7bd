"""A trained full checkpoint in a stored form, without training; or as a start of DPQ training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.any_model.calibration import Knowledge, Use
from fairseq_dpq.fairseq_plugin.choosing import choose, decoder_only
from fairseq_dpq.fairseq_plugin.configs import set_options
from fairseq_dpq.fairseq_plugin.load_check import loads_in_fairseq
from fairseq_dpq.fairseq_plugin.options import PluginOptions
from fairseq_dpq.files.checkpoint import Checkpoint, separate, stored_bytes
from fairseq_dpq.files.compaction import inference_state, stored_table
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.files.report import same_table, token_tables
from fairseq_dpq.files.upgrading import upgraded_names
from fairseq_dpq.forms import DEFAULT_FORM, FORMS
from fairseq_dpq.forms.base import Form, Improvement, Settings
from fairseq_dpq.forms.quantization import HIGH_ERROR, reconstruction_error
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.methods.base import TableUse
from fairseq_dpq.sizes import default_D

_PAD = 1  # fairseq's dictionaries have it there

Progress = Callable[[str, int], Callable[[int], None]]


@dataclass
class Quantized:
    """What became of one table."""

    path: str
    table: Table
    form: Form
    before: int
    used: Tensor | None
    error: float  # squared, as a share of the table's squared norm
    better: Improvement | None = None  # settings that would lose less, if much is lost


def choose_tables(checkpoint: Checkpoint, wanted: str) -> dict[str, list[str]]:
    """The tables to quantise, by path, with their other names: the words of --dpq-embeddings."""
    tables = [
        [path, *names]
        for path, names in token_tables(checkpoint.weights, checkpoint.model_cfg).items()
        if path.split(".")[-1] == "embed_tokens"
    ]
    if not tables:
        raise CheckpointError(f"{checkpoint.path} has no token embedding (embed_tokens.weight)")
    return {tables[i][0]: tables[i][1:] for i in choose(tables, wanted, "--dpq-embeddings")}


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
) -> tuple[dict[str, Any], list[Quantized]]:
    """A checkpoint whose tables are stored as `kind`, or, with `trainable`, ready to fine-tune.

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
    for path, aliases in choose_tables(checkpoint, options.embeddings).items():
        decoder = decoder_only([path, *aliases])
        full = checkpoint.weights[f"{path}.weight"]
        _check_finite(path, full)
        # The padding row of a tied table is trained as any output row is, and must be kept.
        pad = _PAD if len(full) > _PAD and (trainable or not bool(full[_PAD].any())) else None
        table = Table(full.shape[0], full.shape[1], pad, {}, aliases)
        table.tied = _tied(weights, checkpoint.model_cfg, path, aliases)
        for name in [path, *aliases, *table.tied]:
            del weights[f"{name}.weight"]
        if trainable:
            config = options.of_table(decoder)
            config.validate(table.embedding_dim, options.format(decoder), f"{path}.embedding_dim")
            start = TableUse(table.embedding_dim, bool(table.tied), trained=True)
            table.options = config.resolved(start).keywords()
            report = _report(progress, path, 25)
            layer = DPQEmbedding.from_pretrained(
                full.float(), pad, seed=seed, progress=report, **table.options
            )
            form, tensors = layer.eval().compact(packed=True), layer.state_dict()
        else:
            own = settings(decoder) if settings is not None else {}
            if "D" in own and own["D"] is None:
                own["D"] = default_D(table.embedding_dim, close=True)
            report = _report(progress, path, FORMS[kind].work(own))
            known = None
            if FORMS[kind].takes_use and use_of is not None:
                known = Knowledge(full, None, bool(table.tied), use_of(path, len(full)))
                use = {"weight": known.weight, "metric": known.metric}
                own = {**own, **use, "corrected": known.share is not None}
            try:
                FORMS[kind].check(table.embedding_dim, options.format(decoder), **own)
                form = FORMS[kind].from_table(full, pad, seed=seed, progress=report, **own)
                if known is not None:
                    known.correct(form, full)
            except ValueError as error:
                raise CheckpointError(f"{path}: {error}") from error
            tensors = form.state_dict()
            table = stored_table(table, form)
        record.tables[path] = table
        tensors = separate(tensors)
        for name in [path, *aliases]:
            weights.update({f"{name}.{key}": tensor for key, tensor in tensors.items()})
        usage = form.codes_in_use()
        used = None if usage is None else usage["used"]
        lost = reconstruction_error(full, form, pad)
        better = form.improvement(full, seed) if lost > HIGH_ERROR else None
        done.append(Quantized(path, table, form, stored_bytes(full), used, lost, better))
    new = inference_state(checkpoint, separate(weights), record, exact_logits)
    set_options(Checkpoint(checkpoint.path, new, 0).model_cfg, options.to_keys())
    return new, done


def _report(progress: Progress | None, path: str, steps: int) -> Callable[[int], None] | None:
    bar = progress(f"quantise {path}", steps) if progress is not None else None
    return None if bar is None else lambda step: bar(1)


def _check_finite(path: str, full: Tensor) -> None:
    if not bool(torch.isfinite(full.float().sum())) and not bool(torch.isfinite(full).all()):
        raise CheckpointError(f"{path}.weight holds NaN or infinite numbers: training has diverged")


def _tied(weights: Mapping[str, Tensor], cfg: Any, path: str, aliases: list[str]) -> list[str]:
    """Layers that multiply by the same table."""
    paths = [key[: -len(".weight")] for key in weights if key.endswith(".weight")]
    others = [other for other in paths if other.split(".")[-1] != "embed_tokens"]
    own = [path, *aliases]
    return [x for x in others if any(same_table(weights, cfg, table, x) for table in own)]


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
