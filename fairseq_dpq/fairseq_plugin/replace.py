"""Find the token tables of a fairseq model and replace them by DPQ tables.

It works on the finished model and relies on what all architectures have in common: a token table is
an nn.Embedding called `embed_tokens`, and what shares its Parameter is tied to it.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_dpq import model as model_tables
from fairseq_dpq.config import DPQConfigError, flag, format_flag
from fairseq_dpq.fairseq_plugin import resume
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.fairseq_plugin.layers import FairseqDPQEmbedding, form_class, tie_output
from fairseq_dpq.fairseq_plugin.options import TIED_BY, PluginOptions, choose, decoder_only
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.methods.base import TableUse
from fairseq_dpq.model import EmbeddingTable, put
from fairseq_dpq.size_report import Change, Left, outlook, share
from fairseq_dpq.sizes import bits_note

logger = logging.getLogger("fairseq_dpq")

# What DPQ cannot replace, by type, and the flag that a model has it by.
_OTHER_KINDS = {
    "AdaptiveInput": "--adaptive-input",
    "CharacterTokenEmbedder": "--character-embeddings",
    "TiedLinear": "--tie-adaptive-weights",
}


def find_tables(model: nn.Module) -> list[EmbeddingTable]:
    """The token tables of a fairseq model, in order, each once."""
    return model_tables.find_tables(model, lambda path, _: path.split(".")[-1] == "embed_tokens")


def replace_tables(
    model: nn.Module,
    cfg: Any,
    options: PluginOptions,
    max_update: int = 0,
    saved: resume.Saved = resume.NOTHING,
) -> TablesRecord:
    """Put fresh DPQ tables into a model that is about to be trained for `max_update` updates.

    `saved` is what the training goes on from: options that the user left open keep the values that
    they took there.
    """
    tables = find_tables(model)
    whole = sum(_nbytes(parameter) for parameter in model.parameters())
    chosen = choose(tables, options.embeddings)
    for name in ("decoder_K", "decoder_D"):
        if getattr(options, name) and not any(decoder_only(found.paths) for found in chosen):
            raise DPQConfigError(
                f"{format_flag(name, getattr(options, name))} has no effect: no table that becomes "
                f"DPQ ({', '.join(found.path for found in chosen)}) belongs to the decoder only; "
                "add --dpq-embeddings all where the decoder has a table of its own, or leave it out"
            )
    record = TablesRecord({})
    for found in chosen:
        _check_kind(found)
        record.tables[found.path] = _replace(model, found, cfg, options, max_update, saved)
    _report(model, whole, tables, record)
    return record


def _replace(
    model: nn.Module,
    found: EmbeddingTable,
    cfg: Any,
    options: PluginOptions,
    max_update: int,
    saved: resume.Saved,
) -> Table:
    """Replace one table; its entry in the record."""
    old, path, in_decoder = found.module, found.path, decoder_only(found.paths)
    dim, tied = old.embedding_dim, bool(found.sharing) or len(found.readers) > 1
    vectors = get_option(cfg, f"{'decoder' if in_decoder else 'encoder'}_embed_path")
    use = TableUse(dim, tied, max_update, saved.trained or bool(vectors))
    words = options.format(in_decoder), _dim_flag(in_decoder, dim, cfg)
    given = options.of_table(in_decoder)
    given.validate(dim, *words)
    restored = path in saved.tables
    if restored:
        given = resume.adopt(given, path, saved)
    config = given.resolved(use)
    config.validate(dim, *words)
    # An output layer that shares the table learns the padding row as any other: with a logit of 0
    # for ever, padding would keep its share of the softmax.
    padding = None if found.sharing else old.padding_idx
    sharing = [path for path, _, _ in found.sharing]
    entry = Table(len(old.weight), dim, padding, config.keywords(), found.paths[1:], sharing)
    table = FairseqDPQEmbedding(*entry.size, **entry.options)
    table.ignored = old.padding_idx
    kept = [f.name for f in fields(config) if f.metadata["keeps"]]
    if any(getattr(given, name) is None and getattr(config, name) is not None for name in kept):
        table.open_schedule = given, use  # the length of the training decides
    elif config.method.describe_start(config):
        logger.info(f"{path}: {config.method.describe_start(config)}")
    if not vectors:
        table.reset_parameters(like=old.weight, tied=tied)
    if not restored:
        try:
            table.load_option_files(path)
        except ValueError as error:
            raise DPQConfigError(f"{path}: {error}") from error
    if vectors:  # last: the start follows the codes of a file
        logger.info(f"{path}: k-means of the vectors from {vectors}")
        table.start_from_table(old.weight.detach().float())
    if not old.weight.requires_grad:
        table.requires_grad_(False)
    put(model, found, table, tie_output)
    return entry


@torch.no_grad()
def scale_tables(model: nn.Module, options: PluginOptions) -> None:
    """Multiply the initial weights of full tables, as --dpq-full-start says."""
    for found in choose(find_tables(model), options.embeddings):
        if not isinstance(found.weight, nn.Parameter):
            raise DPQConfigError(f"{flag('full_start')}: {found.path} is not a plain table")
        found.weight.mul_(options.full_start)
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
        if done & {*found[path].paths}:
            # The model shares this table, but the tool that wrote the file could not know that.
            continue
        done.add(path)
        rows = getattr(found[path].module, "num_embeddings", table.num_embeddings)
        if rows != table.num_embeddings:
            raise DPQConfigError(
                f"the checkpoint's table at {path} has {table.num_embeddings:,} rows, but the "
                f"dictionary of this data gives {rows:,}: name the data that it was trained on"
            )
        new: Any
        if record.stage == "compact":
            # float32, as fairseq builds models; half-precision values are converted on loading
            form, settings = table.form_class()
            new = form_class(form.kind)(*table.size, **settings)
            new.exact_logits = exact_logits
        else:
            new = FairseqDPQEmbedding(*table.size, **table.options)
        new.train(model.training)
        put(model, found[path], new, tie_output)


def _check_kind(found: EmbeddingTable) -> None:
    """Raise DPQConfigError for a table that is more than a plain one."""
    tied = [(path, layer) for path, layer, _ in found.sharing if _kind(layer) == "TiedLinear"]
    plain = type(found.module) is nn.Embedding
    for path, module in tied if plain else [(found.path, found.module)]:
        other = _OTHER_KINDS.get(_kind(module))
        raise DPQConfigError(
            f"--dpq-embeddings: {path} is of type {_kind(module)}: DPQ replaces plain nn.Embedding "
            "tables only" + (f"; leave {other} out" if other else "")
        )


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _dim_flag(in_decoder: bool, dim: int, cfg: Any) -> str:
    """The flag that sets a table's embedding size."""
    side = "decoder" if in_decoder else "encoder"
    # Language models use --decoder-input-dim for their table, other models embed-dim.
    own = get_option(cfg, f"{side}_input_dim")
    name = "input" if own == dim != get_option(cfg, f"{side}_embed_dim") else "embed"
    return f"--{side}-{name}-dim"


def _report(
    model: nn.Module, whole: int, tables: list[EmbeddingTable], record: TablesRecord
) -> None:
    """Log which tables were replaced, with the CR of each, their share of the model, and what
    compressing the others would bring."""
    full = compact = 0
    left, shapes = [], set()
    first = next(iter(record.tables.values()))
    rate = first.config.compression_ratio(*first.size[:2])
    for found in tables:
        path, table = found.path, record.tables.get(found.path)
        if table is None:
            logger.info(f"{path}: not replaced (not chosen by --dpq-embeddings)")
            if found.weight is not None:
                nbytes = _nbytes(found.weight)
                left.append(Left(path, nbytes, int(nbytes / rate), "--dpq-embeddings all"))
                shapes.add(tuple(found.weight.shape))
            continue
        c, size = table.config, table.size[:2]
        text = f"{size[0]} x {size[1]} -> DPQ {c.describe()}"
        if table.aliases:
            text += f", also at {', '.join(table.aliases)}"
        if table.tied:
            text += f", tied to {', '.join(table.tied)}"
        ratio = c.compression_ratio(*size)
        logger.info(f"{path}: {text}; compression ratio {ratio:.1f} once compact")
        if "K" in table.options and bits_note(table.options["K"]):
            logger.info(f"{path}: {bits_note(table.options['K'])}")
        full += 4 * size[0] * size[1]
        compact += c.compact_bits(*size) // 8
        shapes.add(size)
    tied = {path for found in tables for path, _, _ in found.sharing}
    for path, module in model.named_modules():
        how, weight = TIED_BY.get(path.split(".")[-1]), module._parameters.get("weight")
        if how and path not in tied and weight is not None and tuple(weight.shape) in shapes:
            left.append(Left(path, _nbytes(weight), 0, how))
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
