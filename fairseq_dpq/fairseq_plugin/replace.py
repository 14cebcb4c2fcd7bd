"""Find the token tables of a fairseq model and replace them by DPQ tables.

It works on the finished model and relies on what all architectures have in common: a token table is
an nn.Embedding called `embed_tokens`, and what shares its Parameter is tied to it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_dpq import model as model_tables
from fairseq_dpq.config import DPQConfigError, flag, format_flag
from fairseq_dpq.fairseq_plugin import resume, training
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.fairseq_plugin.layers import FairseqDPQEmbedding, form_class, tie_output
from fairseq_dpq.fairseq_plugin.options import TIED_BY, PluginOptions, choose, decoder_only
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.methods import MethodOptions
from fairseq_dpq.methods.base import TableUse
from fairseq_dpq.model import EmbeddingTable, put
from fairseq_dpq.size_report import Change, Left, outlook, share
from fairseq_dpq.sizes import bits_note

logger = logging.getLogger("fairseq_dpq")


def find_tables(model: nn.Module) -> list[EmbeddingTable]:
    """The token tables of a fairseq model, in order, each once."""
    return model_tables.find_tables(model, lambda path, _: path.split(".")[-1] == "embed_tokens")


def replace_tables(
    model: nn.Module,
    cfg: Any,
    options: PluginOptions,
    max_update: int = 0,
    trained: bool = False,
    saved: resume.Saved | None = None,
) -> TablesRecord:
    """Put fresh DPQ tables into a model that is about to be trained for `max_update` updates.

    `trained` if a trained model will be loaded into it. `saved` is of the checkpoint that will be
    restored, if any: options that the user left open keep the values that they took there.
    """
    tables = find_tables(model)
    whole = sum(_nbytes(parameter) for parameter in model.parameters())
    chosen = _choose(tables, options, model)
    for name in ("decoder_K", "decoder_D"):
        if getattr(options, name) and not any(decoder_only(found.paths) for found in chosen):
            raise DPQConfigError(
                f"{format_flag(name, getattr(options, name))} has no effect: no table that becomes "
                f"DPQ ({', '.join(found.path for found in chosen)}) belongs to the decoder only; "
                "add --dpq-embeddings all where the decoder has a table of its own, or leave it out"
            )
    record = TablesRecord({})
    for found in chosen:
        _refuse_what_cannot_be(found)
        old, in_decoder = found.module, decoder_only(found.paths)
        assert isinstance(old, nn.Embedding)
        config = options.of_table(in_decoder)
        words = options.format(in_decoder), _dim_flag(found, old, cfg)
        config.validate(old.embedding_dim, *words)
        restored = saved is not None and found.path in saved.record.tables
        if saved is not None and restored:
            config = resume.adopt(config, found.path, saved)
        tied = bool(found.sharing) or len(found.paths) > 1
        vectors = get_option(cfg, f"{'decoder' if in_decoder else 'encoder'}_embed_path")
        use = TableUse(old.embedding_dim, tied, max_update, trained or bool(vectors))
        given, config = config, config.resolved(use)
        config.validate(old.embedding_dim, *words)
        table = FairseqDPQEmbedding(
            old.num_embeddings,
            old.embedding_dim,
            _padding(found),
            device=old.weight.device,
            dtype=old.weight.dtype,
            **config.keywords(),
        )
        table.ignored = old.padding_idx
        if training.is_open(given, config):
            table.open_schedule = given, use
        elif config.method.describe_start(config):
            logger.info(f"{found.path}: {config.method.describe_start(config)}")
        if not vectors:
            table.reset_parameters(like=old.weight, tied=tied)
        if not restored:
            try:
                table.load_option_files(found.path)
            except ValueError as error:
                raise DPQConfigError(f"{found.path}: {error}") from error
        if vectors:  # last: the start follows the codes of a file
            logger.info(f"{found.path}: k-means of the vectors from {vectors}")
            table.start_from_table(old.weight.detach().float())
        if not old.weight.requires_grad:
            table.requires_grad_(False)
        put(model, found, table, tie_output)
        record.tables[found.path] = _describe(found, config)
    _report(model, whole, tables, record)
    return record


@torch.no_grad()
def scale_tables(model: nn.Module, options: PluginOptions) -> None:
    """Multiply the initial weights of full tables, as --dpq-full-start says."""
    for found in _choose(find_tables(model), options, model):
        weight: Any = getattr(found.module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            raise DPQConfigError(f"{flag('full_start')}: {found.path} is not a plain table")
        weight.mul_(options.full_start)
        logger.info(f"{found.path}: a full table that starts at {options.full_start:g} of its size")


def restore_tables(model: nn.Module, record: TablesRecord, exact_logits: bool = False) -> None:
    """Replace the tables that a checkpoint's record names, before the checkpoint is loaded.

    With `exact_logits`, tied output layers multiply by the dense table of a stored form."""
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
        new: Any
        if record.stage == "compact":
            # float32, as fairseq builds models; half-precision values are converted on loading
            settings = dict(table.form)
            new = form_class(settings.pop("kind"))(*size, **settings)
            new.exact_logits = exact_logits
        else:
            new = FairseqDPQEmbedding(*size, **table.options)
        new.train(model.training)
        put(model, found[path], new, tie_output)


def _choose(
    tables: list[EmbeddingTable], options: PluginOptions, model: nn.Module
) -> list[EmbeddingTable]:
    if not tables:
        raise DPQConfigError(
            f"{flag('K')}: {type(model).__name__} has no token embedding that DPQ "
            "could replace (no module called embed_tokens); leave --dpq-K out for this model"
        )
    paths = [found.paths for found in tables]
    return [tables[i] for i in choose(paths, options.embeddings)]


def _refuse_what_cannot_be(found: EmbeddingTable) -> None:
    kind = type(found.module).__name__
    if type(found.module) is not nn.Embedding:
        hint = {
            "AdaptiveInput": "it already varies the embedding size; leave --adaptive-input out",
            "CharacterTokenEmbedder": "it has no token table; leave --character-embeddings out",
        }.get(kind, "DPQ replaces plain nn.Embedding tables only")
        raise DPQConfigError(f"--dpq-embeddings: {found.path} is of type {kind}: {hint}")
    for path, output, _ in found.sharing:
        if type(output).__name__ == "TiedLinear":
            raise DPQConfigError(
                f"--dpq-embeddings: {found.path} is tied to the adaptive softmax at {path}, which "
                "needs slices of a stored table; leave --tie-adaptive-weights out"
            )


def _dim_flag(found: EmbeddingTable, table: nn.Embedding, cfg: Any) -> str:
    """The flag that sets a table's embedding size."""
    side = "decoder" if decoder_only(found.paths) else "encoder"
    # Language models use --decoder-input-dim for their table, other models embed-dim.
    own = get_option(cfg, f"{side}_input_dim")
    other = get_option(cfg, f"{side}_embed_dim")
    name = "input" if own == table.embedding_dim != other else "embed"
    return f"--{side}-{name}-dim"


def _padding(found: EmbeddingTable) -> int | None:
    """The row that is zero. An output layer that shares the table learns the padding row as any
    other: with a logit of 0 for ever, padding would keep its share of the softmax."""
    return None if found.sharing else found.module.padding_idx  # type: ignore[return-value]


def _describe(found: EmbeddingTable, config: MethodOptions) -> Table:
    assert isinstance(found.module, nn.Embedding)
    return Table(
        num_embeddings=found.module.num_embeddings,
        embedding_dim=found.module.embedding_dim,
        padding_idx=_padding(found),
        options=config.keywords(),
        aliases=found.paths[1:],
        tied=[path for path, _, _ in found.sharing],
    )


def _report(
    model: nn.Module, whole: int, tables: list[EmbeddingTable], record: TablesRecord
) -> None:
    """Log which tables were replaced, with the CR of each, their share of the model, and what
    compressing the others would bring."""
    full = compact = 0
    left, shapes = [], set()
    first = next(iter(record.tables.values()))
    rate = first.config.compression_ratio(first.num_embeddings, first.embedding_dim)
    for found in tables:
        table = record.tables.get(found.path)
        if table is None:
            logger.info(f"{found.path}: not replaced (not chosen by --dpq-embeddings)")
            if isinstance(found.module, nn.Embedding):
                nbytes = _nbytes(found.module.weight)
                left.append(Left(found.path, nbytes, int(nbytes / rate), "--dpq-embeddings all"))
                shapes.add((found.module.num_embeddings, found.module.embedding_dim))
            continue
        c, size = table.config, (table.num_embeddings, table.embedding_dim)
        text = f"{size[0]} x {size[1]} -> DPQ {c.describe()}"
        if table.aliases:
            text += f", also at {', '.join(table.aliases)}"
        if table.tied:
            text += f", tied to {', '.join(table.tied)}"
        ratio = c.compression_ratio(*size)
        logger.info(f"{found.path}: {text}; compression ratio {ratio:.1f} once compact")
        if "K" in table.options and bits_note(table.options["K"]):
            logger.info(f"{found.path}: {bits_note(table.options['K'])}")
        full += 4 * size[0] * size[1]
        compact += c.compact_bits(*size) // 8
        shapes.add(size)
    tied = {path for found in tables for path, _, _ in found.sharing}
    for path, module in model.named_modules():
        name = path.split(".")[-1]
        weight: Any = getattr(module, "weight", None)
        own = name in TIED_BY and path not in tied and isinstance(weight, nn.Parameter)
        if own and tuple(weight.shape) in shapes:
            left.append(Left(path, _nbytes(weight), 0, TIED_BY[name]))
    after = Change(whole, whole - full + compact)
    for what, change, note in (
        ("embeddings", Change(full, compact), f"{share(full, whole)} of the model"),
        ("model", after, "without optimiser state"),
    ):
        sizes = f"{change.before:,} -> {change.after:,} bytes once compact"
        logger.info(f"{what}: {sizes}, {change.smaller()} ({note})")
    for line in outlook(after, left):
        logger.info(line)


def _nbytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()
