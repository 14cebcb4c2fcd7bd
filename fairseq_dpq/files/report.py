"""The facts about tables and checkpoints that the tools print, as plain data for text and JSON."""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from fairseq_dpq.fairseq_plugin.choosing import TIED_BY
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.files.checkpoint import Checkpoint, keys_of, named, stored_bytes
from fairseq_dpq.files.compaction import Compacted
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.forms.base import Form
from fairseq_dpq.size_report import Change, Left

_POSITIONS = re.compile(r"(embed_positions|position|segment)")
_TOKENS = re.compile(r"(^|\.)(embed_tokens|embeddings\.\d+\.0)\.weight$")
_OUTPUT = re.compile(rf"({'|'.join(TIED_BY)})(\.weight|\.weight_v)$")


def table_facts(path: str, table: Table, form: Form, used: Tensor | None) -> dict[str, Any]:
    """Sizes of one table; `form` is how it is, or would be, stored."""
    n, d = table.num_embeddings, table.embedding_dim
    bits = table.config.compact_bits(n, d) if table.options else form.formula_bits()
    facts = {
        "path": path,
        "aliases": table.aliases,
        "tied_outputs": table.tied,
        "num_embeddings": n,
        "embedding_dim": d,
        "form": form.kind,
        "description": table.config.describe()
        if table.options
        else f"{form.kind} {form.describe()}",
        **({"method": table.options["method"]} if table.options else {}),
        **form.settings(),
        "full_bytes": 4 * n * d,
        "formula_bytes": bits / 8,
        "formula_cr": 32 * n * d / bits,
        "compact_bytes": form.saved_nbytes,
        "measured_cr": 4 * n * d / form.saved_nbytes,
        "bits_per_symbol": form.bits_per_symbol(),
        "notes": form.notes(),
        "used_codes": None,
    }
    if table.options and "K" in facts:  # what it was trained with: unused codes may be gone
        facts["K"] = table.options["K"]
    if used is not None:
        counts = sorted(used.tolist())
        middle = counts[len(counts) // 2]
        facts["used_codes"] = {"min": counts[0], "median": middle, "max": counts[-1]}
    return facts


def compacted_facts(done: Compacted) -> dict[str, Any]:
    """What became of one table."""
    facts = table_facts(done.path, done.table, done.form, done.used)
    facts["training_bytes"] = done.before
    facts["stored_codes"] = done.form.code_sizes or None
    return facts


def left_alone(checkpoint: Checkpoint, record: TablesRecord | None) -> list[dict[str, Any]]:
    """Tables that stay as they are, and why."""
    tables = record.tables if record else {}
    names = [name for path, table in tables.items() for name in named(path, table)]
    taken = set(keys_of(checkpoint.weights, names))
    out = []
    first: dict[tuple[int, torch.Size], str] = {}  # the first name of a tensor, by its memory
    for key, tensor in checkpoint.weights.items():
        if key in taken or tensor.dim() != 2:
            continue
        twin = first.setdefault((tensor.data_ptr(), tensor.shape), key)
        if _POSITIONS.search(key):
            kind, why = "positions", "positions, not tokens"
        elif twin != key and (_TOKENS.search(key) or _OUTPUT.search(key)):
            kind, why = "tied", f"tied, the same bytes as {twin}"
        elif _TOKENS.search(key):
            kind, why = "table", "a full table: not among --dpq-embeddings"
        elif _OUTPUT.search(key):
            kind, why = "output", "an output layer with weights of its own"
        else:
            continue
        facts = {"name": key, "kind": kind, "shape": list(tensor.shape), "why": why}
        out.append({**facts, "bytes": tensor.numel() * tensor.element_size()})
    return out


def token_tables(weights: Mapping[str, Tensor], cfg: Any) -> dict[str, list[str]]:
    """Full token tables of a state_dict by path, each with its other names."""
    found: dict[str, list[str]] = {}
    for key, tensor in weights.items():
        if tensor.dim() != 2 or not _TOKENS.search(key):
            continue
        path = key[: -len(".weight")]
        for other, names in found.items():
            if same_table(weights, cfg, other, path):
                names.append(path)
                break
        else:
            found[path] = []
    return found


def same_table(weights: Mapping[str, Tensor], cfg: Any, table: str, other: str) -> bool:
    """Whether the module at `other` uses the token table at `table`.

    In a file of a run on CPU they share memory. One of a GPU, or of half precision, has a copy for
    each name: there the model's flags tell a tie from two tables that happen to be equal, such as
    the same frozen vectors on both sides.
    """
    a, b = weights[f"{table}.weight"], weights[f"{other}.weight"]
    if a.shape != b.shape:
        return False
    if a.data_ptr() == b.data_ptr():
        return True
    return _flags_tie(cfg, table, other) and torch.equal(a, b)


def _flags_tie(cfg: Any, table: str, other: str) -> bool:
    def on(*flags: str) -> bool:
        return any(get_option(cfg, flag) for flag in flags)

    if on("share_all_embeddings"):
        return True
    name, side = other.rsplit(".", 1)[-1], _side(table)
    if name == "lm_head":
        return not on("untie_weights_roberta")
    if side != _side(other):
        return False
    if name == "embed_tokens":  # of several languages
        return on(f"share_{side}_embeddings", f"share_{side}s")
    return on(f"share_{side}_input_output_embed", "share_input_output_embed")


def _side(path: str) -> str:
    parts = path.split(".")
    return "decoder" if any(part.startswith("decoder") for part in parts) else "encoder"


def run_of(checkpoint: Checkpoint, record: TablesRecord) -> Any:
    """What the checkpoints of one training have in common, and those of two hardly ever."""
    cfg = checkpoint.state.get("cfg")
    options = [("checkpoint", "save_dir"), ("common", "seed"), ("task", "data")]
    own = [get_option(get_option(cfg, section), key) for section, key in options]
    tables = {
        path: (table.num_embeddings, table.embedding_dim, table.options)
        for path, table in record.tables.items()
    }
    return [*map(str, own), get_option(checkpoint.model_cfg, "arch"), tables]


def model_sizes(
    weights: Mapping[str, Tensor], record: TablesRecord, tables: Sequence[Mapping[str, Any]]
) -> tuple[Change, Change]:
    """The embeddings and the whole model, full and compact, given the facts of its tables.

    All that is not a DPQ table counts as it is in `weights`.
    """
    names = [name for path, table in record.tables.items() for name in named(path, table)]
    mine = set(keys_of(weights, names))
    rest = stored_bytes([tensor for key, tensor in weights.items() if key not in mine])
    full = sum(table["full_bytes"] for table in tables)
    small = sum(table["compact_bytes"] for table in tables)
    return Change(full, small), Change(rest + full, rest + small)


def could_follow(
    left: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]
) -> list[Left]:
    """The tables and output layers among what was left alone that could be compressed too, at the
    ratio that the first table has."""
    ratio = tables[0]["measured_cr"] if tables else 1.0
    out = []
    for item in left:
        if item["kind"] == "table":
            small = int(item["bytes"] / max(ratio, 1))
            out.append(Left(item["name"], item["bytes"], small, "--dpq-embeddings all"))
    shapes = [(table["num_embeddings"], table["embedding_dim"]) for table in tables]
    shapes += [tuple(item["shape"]) for item in left if item["kind"] == "table"]
    for item in left:
        if item["kind"] == "output" and tuple(item["shape"]) in shapes:
            layer = item["name"].rsplit(".", 2)[-2]
            out.append(Left(item["name"], item["bytes"], 0, TIED_BY[layer]))
    return out
