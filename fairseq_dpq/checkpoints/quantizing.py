"""Product quantisation of a trained full checkpoint: k-means in each subspace, no training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.checkpoints.compaction import compact_layer, inference_state
from fairseq_dpq.checkpoints.contents import Checkpoint, separate, stored_bytes
from fairseq_dpq.checkpoints.errors import CheckpointError
from fairseq_dpq.checkpoints.facts import same_table, token_tables
from fairseq_dpq.checkpoints.upgrading import upgraded_names
from fairseq_dpq.config import DPQConfig, PluginConfig
from fairseq_dpq.embedding import DPQEmbedding
from fairseq_dpq.tables import Table, TablesRecord, set_options

_ROWS = 1 << 13
_PAD = 1  # fairseq's dictionaries have it there

Progress = Callable[[str, int], Callable[[int], None]]


@dataclass
class Quantized:
    """What became of one table."""

    path: str
    table: Table
    before: int
    stored: int
    used: list[int]
    bits: int
    error: float  # squared, as a share of the table's squared norm


def choose_tables(checkpoint: Checkpoint, wanted: str) -> dict[str, list[str]]:
    """The tables to quantise, by path, with their other names: the words of --dpq-embeddings."""
    tables = {
        path: names
        for path, names in token_tables(checkpoint.weights, checkpoint.model_cfg).items()
        if path.split(".")[-1] == "embed_tokens"
    }
    if not tables:
        raise CheckpointError(f"{checkpoint.path} has no token embedding (embed_tokens.weight)")
    every = {name: path for path, names in tables.items() for name in [path, *names]}
    if wanted == "all":
        return tables
    if wanted == "input":
        encoders = {p: names for p, names in tables.items() if not _decoders_only([p, *names])}
        return encoders or tables
    if wanted == "decoder":
        chosen = {p: n for p, n in tables.items() if any(_in_decoder(x) for x in [p, *n])}
        if not chosen:
            raise CheckpointError(
                f"--embeddings decoder: {checkpoint.path} has no decoder table; it has "
                + ", ".join(every)
            )
        return chosen
    chosen = {}
    for name in (part.strip() for part in wanted.split(",")):
        if name not in every:
            raise CheckpointError(
                f"--embeddings {wanted}: no token table at {name!r}; choose input, decoder, all, "
                "or of " + ", ".join(every)
            )
        chosen[every[name]] = tables[every[name]]
    return chosen


def _in_decoder(path: str) -> bool:
    return any(part.startswith("decoder") for part in path.split("."))


def _decoders_only(paths: list[str]) -> bool:
    return all(_in_decoder(path) for path in paths)


def quantize_state(
    checkpoint: Checkpoint,
    options: PluginConfig,
    *,
    source: str,
    trainable: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[Quantized]]:
    """A checkpoint with quantised tables, compact or, with `trainable`, for fine-tuning."""
    if checkpoint.record() is not None:
        raise CheckpointError(
            f"{checkpoint.path} has DPQ tables already; fairseq-dpq-compact makes it small"
        )
    if not options.enabled:
        raise CheckpointError("--dpq-K is missing; try --dpq-K 32")
    state = {**checkpoint.state, "model": upgraded_names(checkpoint.weights)}
    checkpoint = replace(checkpoint, state=state)
    weights = dict(checkpoint.weights)
    form, origin = ("training", None) if trainable else ("compact", source)
    record = TablesRecord({}, form=form, source=origin)
    done = []
    for path, aliases in choose_tables(checkpoint, options.embeddings).items():
        config = options.table_config(_decoders_only([path, *aliases]))
        if not trainable:  # plain product quantisation: the nearest centroid of each part
            config = DPQConfig(K=config.K, D=config.D, share_subspaces=config.share_subspaces)
            config = replace(config, method="vq", normalize=False)
        full = checkpoint.weights[f"{path}.weight"]
        config.validate(full.shape[1], _say, f"{path}.embedding_dim")
        tied = _tied(weights, checkpoint.model_cfg, path, aliases)
        for name in [path, *aliases, *tied]:
            del weights[f"{name}.weight"]
        tensors, result = _quantize(path, full, config, trainable, seed, progress)
        result.table = replace(result.table, aliases=aliases, tied=tied)
        record.tables[path] = result.table
        for name in [path, *aliases]:
            weights.update({f"{name}.{key}": tensor for key, tensor in tensors.items()})
        done.append(result)
    new = inference_state(checkpoint, separate(weights), record)
    set_options(Checkpoint(checkpoint.path, new, 0).model_cfg, _flat(options))
    return new, done


def _say(name: str, value: Any) -> str:
    return f"--dpq-{name.replace('_', '-')} {value}"


def _flat(options: PluginConfig) -> dict[str, Any]:
    from fairseq_dpq.glue.options import to_keys

    return to_keys(options)


def _tied(weights: Mapping[str, Tensor], cfg: Any, path: str, aliases: list[str]) -> list[str]:
    """Layers that multiply by the same table."""
    paths = [key[: -len(".weight")] for key in weights if key.endswith(".weight")]
    others = [other for other in paths if other.split(".")[-1] != "embed_tokens"]
    own = [path, *aliases]
    return [x for x in others if any(same_table(weights, cfg, table, x) for table in own)]


def _quantize(
    path: str,
    full: Tensor,
    config: DPQConfig,
    trainable: bool,
    seed: int,
    progress: Progress | None,
) -> tuple[dict[str, Tensor], Quantized]:
    n, d = full.shape
    if not bool(torch.isfinite(full.float().sum())) and not bool(torch.isfinite(full).all()):
        raise CheckpointError(f"{path}.weight holds NaN or infinite numbers: training has diverged")
    # The padding row of a tied table is trained as any output row is, and must be kept.
    pad = _PAD if n > _PAD and (trainable or not bool(full[_PAD].any())) else None
    bar = progress(f"k-means {path}", 25) if progress is not None else None

    def report(step: int) -> None:
        if bar is not None:
            bar(1)

    layer = DPQEmbedding.from_pretrained(
        full.float(), pad, seed=seed, progress=report, **config.layer_options()
    ).eval()
    module, used = compact_layer(layer)
    error = norm = 0.0
    with torch.no_grad():
        for start in range(0, n, _ROWS):
            rows = torch.arange(start, min(start + _ROWS, n))
            rows = rows[rows != pad] if pad is not None else rows
            part = full[rows].double()
            error += float((part - module(rows).double()).pow(2).sum())
            norm += float(part.pow(2).sum())
    state = separate((layer if trainable else module).state_dict())
    result = Quantized(
        path=path,
        table=Table(n, d, pad, config.layer_options()),
        before=stored_bytes(full),
        stored=module.saved_nbytes,
        used=used.tolist(),
        bits=sum(module.bits),
        error=error / max(norm, 1e-300),
    )
    return state, result


def check_written(state: dict[str, Any], written: Any, trust: bool = False) -> None:
    """Reload a written checkpoint and compare every tensor with what should be there."""
    copy = Checkpoint.load(written, trust)
    same = list(copy.weights) == list(state["model"]) and all(
        torch.equal(tensor, state["model"][key]) for key, tensor in copy.weights.items()
    )
    if not same:
        raise CheckpointError("verification failed: the written file differs from what was made")
