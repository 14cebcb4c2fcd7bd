"""Find the token tables of a fairseq model and replace them by DPQ tables.

It works on the finished model and relies on what all architectures have in common: a token table is
an nn.Embedding called `embed_tokens`, and what shares its Parameter is tied to it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fairseq_dpq.config import (
    DPQConfig,
    DPQConfigError,
    PluginConfig,
    flag,
    say_flag,
    say_flag_of,
)
from fairseq_dpq.fairseq_plugin import resume, schedule
from fairseq_dpq.fairseq_plugin.choosing import TIED_BY, choose, decoder_only
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.fairseq_plugin.layers import FairseqDPQEmbedding, form_class, tie_output
from fairseq_dpq.record import VERSION, Table, TablesRecord
from fairseq_dpq.size_report import Change, Left, outlook, share
from fairseq_dpq.sizes import bits_note

logger = logging.getLogger("fairseq_dpq")


@dataclass
class Found:
    """One token table of a model: all its paths, and the layers that share it."""

    module: nn.Module
    paths: list[str]
    tied: list[tuple[str, nn.Module, str]] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def decoder(self) -> bool:
        """Whether it belongs to decoders only."""
        return decoder_only(self.paths)


def find_tables(model: nn.Module) -> list[Found]:
    """The token tables of a model, in order, each once."""
    by_weight: dict[int, Found] = {}
    named = list(model.named_modules(remove_duplicate=False))
    for path, module in named:
        if path.split(".")[-1] == "embed_tokens":
            weight = getattr(module, "weight", None)
            key = id(weight) if isinstance(weight, nn.Parameter) else id(module)
            found = by_weight.setdefault(key, Found(module, []))
            if path not in found.paths:
                found.paths.append(path)
    seen: set[tuple[int, str]] = set()
    for path, module in named:
        if path.split(".")[-1] == "embed_tokens":
            continue
        for name, parameter in module._parameters.items():
            if id(parameter) in by_weight and (id(module), name) not in seen:
                seen.add((id(module), name))
                by_weight[id(parameter)].tied.append((path, module, name))
    return list(by_weight.values())


def replace_tables(
    model: nn.Module,
    cfg: Any,
    options: PluginConfig,
    max_update: int = 0,
    saved: resume.Saved | None = None,
) -> TablesRecord:
    """Put fresh DPQ tables into a model that is about to be trained for `max_update` updates.

    `saved` is of the checkpoint that will be restored, if any: options that the user left open
    keep the values that they took there.
    """
    tables = find_tables(model)
    whole = sum(_nbytes(parameter) for parameter in model.parameters())
    chosen = _choose(tables, options, model)
    for name in ("decoder_K", "decoder_D"):
        if getattr(options, name) and not any(found.decoder for found in chosen):
            raise DPQConfigError(
                f"{say_flag(name, getattr(options, name))} has no effect: no table that becomes "
                f"DPQ ({', '.join(found.path for found in chosen)}) belongs to the decoder only; "
                "add --dpq-embeddings all where the decoder has a table of its own, or leave it out"
            )
    record = TablesRecord({}, origin=saved.record.origin if saved else VERSION)
    for found in chosen:
        _refuse_what_cannot_be(found)
        old = found.module
        assert isinstance(old, nn.Embedding)
        config = options.table_config(found.decoder)
        config.validate(
            old.embedding_dim, say_flag_of(options, found.decoder), _dim_flag(found, old, cfg)
        )
        restored = saved is not None and found.path in saved.record.tables
        if saved is not None and restored:
            config = resume.adopt(config, found.path, saved)
        tied = bool(found.tied) or len(found.paths) > 1
        config = config.with_D(old.embedding_dim)
        given, config = config, config.resolved(tied, max_update)
        table = FairseqDPQEmbedding(
            old.num_embeddings,
            old.embedding_dim,
            old.padding_idx,
            device=old.weight.device,
            dtype=old.weight.dtype,
            **config.layer_options(),
        )
        if config.warmup_updates and None in (given.warmup_updates, given.ramp_updates):
            table.open_schedule = given, tied
        elif "warmup_updates" in config.method_object.options:
            logger.info(f"{found.path}: {schedule.describe(config)}")
        vectors = get_option(cfg, f"{'decoder' if found.decoder else 'encoder'}_embed_path")
        if vectors:
            logger.info(f"{found.path}: k-means of the vectors from {vectors}")
            table.start_from_table(old.weight.detach().float())
        else:
            table.reset_parameters(like=old.weight, tied=tied)
        if not restored:
            _take_files(table, config, found.path)
        if not old.weight.requires_grad:
            table.requires_grad_(False)
        _put(model, found, table)
        record.tables[found.path] = _describe(found, config)
    _report(tables, record)
    _report_sizes(model, whole, tables, record)
    return record


def restore_tables(model: nn.Module, record: TablesRecord) -> None:
    """Replace the tables that a checkpoint's record names, before the checkpoint is loaded."""
    found = {path: f for f in find_tables(model) for path in f.paths}
    done: set[str] = set()
    for path, table in record.tables.items():
        if path not in found:
            raise DPQConfigError(
                f"the checkpoint has a DPQ table at {path}, but this model has none there; it has "
                + (", ".join(found) or "no token table")
            )
        if any(other in done for other in found[path].paths):
            # The model shares this table, but the tool that wrote the file could not know that.
            continue
        done.add(path)
        rows = getattr(found[path].module, "num_embeddings", table.num_embeddings)
        if rows != table.num_embeddings:
            raise DPQConfigError(
                f"the checkpoint's table at {path} has {table.num_embeddings:,} rows, but the "
                f"dictionary of this data gives {rows:,}: name the data that it was trained on"
            )
        size = (table.num_embeddings, table.embedding_dim, table.padding_idx)
        new: nn.Module
        if record.stage == "compact":
            # float32, as fairseq builds models; half-precision values are converted on loading
            settings = dict(table.form)
            new = form_class(settings.pop("kind"))(*size, **settings)
        else:
            new = FairseqDPQEmbedding(*size, **table.config.layer_options())
        new.train(model.training)
        _put(model, found[path], new)


def _take_files(table: FairseqDPQEmbedding, config: DPQConfig, path: str) -> None:
    try:
        config.method_object.take_files(table.codebook(), config, path)
    except ValueError as error:
        raise DPQConfigError(f"{path}: {error}") from error


def _put(model: nn.Module, found: Found, table: nn.Module) -> None:
    for path in found.paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, table)
    for _, output, parameter in found.tied:
        tie_output(output, parameter, table)


def _choose(tables: list[Found], options: PluginConfig, model: nn.Module) -> list[Found]:
    if not tables:
        raise DPQConfigError(
            f"{say_flag('K', options.K)}: {type(model).__name__} has no token embedding that DPQ "
            "could replace (no module called embed_tokens); leave --dpq-K out for this model"
        )
    paths = [found.paths for found in tables]
    return [tables[i] for i in choose(paths, options.embeddings, flag("embeddings"))]


def _refuse_what_cannot_be(found: Found) -> None:
    kind = type(found.module).__name__
    if type(found.module) is not nn.Embedding:
        hint = {
            "AdaptiveInput": "it already varies the embedding size; leave --adaptive-input out",
            "CharacterTokenEmbedder": "it has no token table; leave --character-embeddings out",
        }.get(kind, "DPQ replaces plain nn.Embedding tables only")
        raise DPQConfigError(f"--dpq-embeddings: {found.path} is a {kind}: {hint}")
    for path, output, _ in found.tied:
        if type(output).__name__ == "TiedLinear":
            raise DPQConfigError(
                f"--dpq-embeddings: {found.path} is tied to the adaptive softmax at {path}, which "
                "needs slices of a stored table; leave --tie-adaptive-weights out"
            )


def _dim_flag(found: Found, table: nn.Embedding, cfg: Any) -> str:
    """The flag that sets a table's embedding size."""
    side = "decoder" if found.decoder else "encoder"
    # Language models use --decoder-input-dim for their table, other models embed-dim.
    own = get_option(cfg, f"{side}_input_dim")
    other = get_option(cfg, f"{side}_embed_dim")
    name = "input" if own == table.embedding_dim != other else "embed"
    return f"--{side}-{name}-dim"


def _describe(found: Found, config: DPQConfig) -> Table:
    assert isinstance(found.module, nn.Embedding)
    return Table(
        num_embeddings=found.module.num_embeddings,
        embedding_dim=found.module.embedding_dim,
        padding_idx=found.module.padding_idx,
        options=config.layer_options(),
        aliases=found.paths[1:],
        tied=[path for path, _, _ in found.tied],
    )


def _report(tables: list[Found], record: TablesRecord) -> None:
    """Log which tables were replaced, with the CR of each, and which were not."""
    for found in tables:
        table = record.tables.get(found.path)
        if table is None:
            logger.info(f"{found.path}: not replaced (not chosen by --dpq-embeddings)")
            continue
        c = table.config
        text = f"{table.num_embeddings} x {table.embedding_dim} -> DPQ {c.describe()}"
        if table.aliases:
            text += f", also at {', '.join(table.aliases)}"
        if table.tied:
            text += f", tied to {', '.join(table.tied)}"
        ratio = c.compression_ratio(table.num_embeddings, table.embedding_dim)
        logger.info(f"{found.path}: {text}; compression ratio {ratio:.1f} once compact")
        if c.method_object.has_codes and bits_note(c.K):
            logger.info(f"{found.path}: {bits_note(c.K)}")


def _report_sizes(model: nn.Module, whole: int, tables: list[Found], record: TablesRecord) -> None:
    """Log what share of the model the tables are, and what compressing the others would bring."""
    full = compact = 0
    left, shapes = [], set()
    first = next(iter(record.tables.values()))
    ratio = first.config.compression_ratio(first.num_embeddings, first.embedding_dim)
    for found in tables:
        table = record.tables.get(found.path)
        if table is not None:
            size = table.num_embeddings, table.embedding_dim
            full += 4 * size[0] * size[1]
            compact += table.config.compact_bits(*size) // 8
            shapes.add(size)
        elif isinstance(found.module, nn.Embedding):
            nbytes = _nbytes(found.module.weight)
            left.append(Left(found.path, nbytes, int(nbytes / ratio), "--dpq-embeddings all"))
            shapes.add((found.module.num_embeddings, found.module.embedding_dim))
    tied = {path for found in tables for path, _, _ in found.tied}
    for path, module in model.named_modules():
        name = path.split(".")[-1]
        weight: Any = getattr(module, "weight", None)
        own = name in TIED_BY and path not in tied and isinstance(weight, nn.Parameter)
        if own and tuple(weight.shape) in shapes:
            left.append(Left(path, _nbytes(weight), 0, TIED_BY[name]))
    embeddings, model_size = Change(full, compact), Change(whole, whole - full + compact)
    for what, change, note in (
        ("embeddings", embeddings, f"{share(full, whole)} of the model"),
        ("model", model_size, "without optimiser state"),
    ):
        sizes = f"{change.before:,} -> {change.after:,} bytes once compact"
        logger.info(f"{what}: {sizes}, {change.smaller()} ({note})")
    for line in outlook(model_size, left):
        logger.info(line)


def _nbytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()
