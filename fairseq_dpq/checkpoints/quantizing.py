"""A trained full checkpoint in a stored form, without training; or as a start of DPQ training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.checkpoints.checkpoint import Checkpoint, separate, stored_bytes
from fairseq_dpq.checkpoints.compaction import inference_state, stored_table
from fairseq_dpq.checkpoints.errors import CheckpointError
from fairseq_dpq.checkpoints.report import same_table, token_tables
from fairseq_dpq.checkpoints.suggesting import HIGH, Better, better_D
from fairseq_dpq.checkpoints.upgrading import upgraded_names
from fairseq_dpq.config import DPQConfig, PluginConfig, say_flag_of
from fairseq_dpq.embedding import DPQEmbedding
from fairseq_dpq.fairseq_plugin.choosing import choose, decoder_only
from fairseq_dpq.fairseq_plugin.configs import set_options
from fairseq_dpq.fairseq_plugin.trial import loads_in_fairseq
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form, Settings
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.forms.quantization import reconstruction_error
from fairseq_dpq.record import Table, TablesRecord
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
    better: Better | None = None  # a D that would lose less, if much is lost


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
    options: PluginConfig,
    *,
    source: str,
    kind: str = "product_codes",
    settings: Callable[[bool], Settings] | None = None,
    trainable: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[Quantized]]:
    """A checkpoint whose tables are stored as `kind`, or, with `trainable`, ready to fine-tune.

    `settings(decoder)` are those of the form for one table, the decoder's or another.
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
            config = options.table_config(decoder)
            say = say_flag_of(options, decoder)
            config.validate(table.embedding_dim, say, f"{path}.embedding_dim")
            config = config.resolved(embedding_dim=table.embedding_dim)
            table.options = config.layer_options()
            report = _report(progress, path, 25)
            layer = DPQEmbedding.from_pretrained(
                full.float(), pad, seed=seed, progress=report, **table.options
            )
            form, tensors = layer.eval().compact(packed=True), layer.state_dict()
        else:
            own = settings(decoder) if settings is not None else {}
            if "D" in own and own["D"] is None:
                own["D"] = default_D(table.embedding_dim)
            report = _report(progress, path, FORMS[kind].work(own))
            try:
                FORMS[kind].check(table.embedding_dim, say_flag_of(options, decoder), **own)
                form = FORMS[kind].from_table(full, pad, seed=seed, progress=report, **own)
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
        better = None
        if lost > HIGH and isinstance(form, CompactEmbedding):
            better = better_D(full, DPQConfig(**form.settings()), pad, seed)
        done.append(Quantized(path, table, form, stored_bytes(full), used, lost, better))
    new = inference_state(checkpoint, separate(weights), record)
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
