"""The token tables of checkpoints, found as those of a model are, and the facts about tables that
the tools print, as plain data for text and JSON."""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor, nn

from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.fairseq_plugin.options import TIED_BY, choose, in_decoder
from fairseq_dpq.files.checkpoint import Checkpoint, keys_of
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.record import Table
from fairseq_dpq.forms.base import Form
from fairseq_dpq.model import EmbeddingTable, tables_among
from fairseq_dpq.size_report import Left

_POSITIONS = re.compile(r"(embed_positions|position|segment)")
_TOKENS = re.compile(r"(^|\.)(embed_tokens|embeddings\.\d+\.0)\.weight$")
_OUTPUT = re.compile(rf"({'|'.join(TIED_BY)})(\.weight|\.weight_v)$")
_PAD = 1  # fairseq's dictionaries have it there


# Finding ------------------------------------------------------------------------------------------


class _Layer(nn.Linear):
    """A matrix of a state_dict that is not a token table."""

    def __init__(self, weight: Tensor) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight, requires_grad=False)


def token_tables(weights: Mapping[str, Tensor], cfg: Any) -> list[EmbeddingTable]:
    """The full token tables of a state_dict, with what shares them.

    In a file of a run on CPU, names of one table share memory. One of a GPU, or of half precision,
    has a copy for each: there the model's flags tell a tie from two tables that happen to be equal,
    such as the same frozen vectors on both sides.
    """
    found = {k: t for k, t in weights.items() if k.endswith(".weight") and t.dim() == 2}
    tables = [key for key in found if _TOKENS.search(key)]
    for table in tables:
        for key, tensor in found.items():
            full = found[table]
            copied = tensor is not full and tensor.shape == full.shape
            if copied and _flags_tie(cfg, table[:-7], key[:-7]) and torch.equal(tensor, full):
                found[key] = full
    named: list[tuple[str, nn.Module]] = []
    for key, tensor in found.items():
        pad = _PAD if len(tensor) > _PAD else None
        token = key in tables
        module = nn.Embedding.from_pretrained(tensor, padding_idx=pad) if token else _Layer(tensor)
        named.append((key[: -len(".weight")], module))
    return tables_among(named)


def choose_tables(checkpoint: Checkpoint, wanted: str) -> list[EmbeddingTable]:
    """The full tables that the words of --dpq-embeddings select."""
    found = token_tables(checkpoint.weights, checkpoint.model_cfg)
    tables = [table for table in found if table.path.split(".")[-1] == "embed_tokens"]
    if not tables:
        raise CheckpointError(f"{checkpoint.path} has no token embedding (embed_tokens.weight)")
    return choose(tables, wanted)


def _flags_tie(cfg: Any, table: str, other: str) -> bool:
    def on(*flags: str) -> bool:
        return any(get_option(cfg, flag) for flag in flags)

    if on("share_all_embeddings"):
        return True
    name, decoder = other.rsplit(".", 1)[-1], in_decoder(table)
    if name == "lm_head":
        return not on("untie_weights_roberta")
    if decoder != in_decoder(other):
        return False
    side = "decoder" if decoder else "encoder"
    if name == "embed_tokens":  # of several languages
        return on(f"share_{side}_embeddings", f"share_{side}s")
    return on(f"share_{side}_input_output_embed", "share_input_output_embed")


# Facts --------------------------------------------------------------------------------------------


def table_facts(path: str, table: Table, form: Form) -> dict[str, Any]:
    """Sizes of one table, and its use of codes; `form` is how it is, or would be, stored."""
    n, d = table.num_embeddings, table.embedding_dim
    bits = table.config.compact_bits(n, d) if table.options else form.formula_bits()
    facts = {
        "path": path,
        "aliases": table.aliases,
        "tied_outputs": table.tied,
        "num_embeddings": n,
        "embedding_dim": d,
        "form": form.kind,
        "description": f"{form.kind} {form.describe()}",
        **form.settings(),
        "full_bytes": 4 * n * d,
        "formula_bytes": bits / 8,
        "formula_cr": 32 * n * d / bits,
        "compact_bytes": form.saved_nbytes,
        "measured_cr": 4 * n * d / form.saved_nbytes,
        "bits_per_symbol": form.bits_per_symbol(),
        "notes": form.notes(),
        "used_codes": None,
        "entropy_bits_per_symbol": None,
    }
    if table.options:
        facts["description"], facts["method"] = table.config.describe(), table.options["method"]
    if table.options and "K" in facts:  # what it was trained with: unused codes may be gone
        facts["K"] = table.options["K"]
    usage = form.codes_in_use()
    if usage is not None:
        counts = sorted(usage["used"].tolist())
        middle = counts[len(counts) // 2]
        facts["used_codes"] = {"min": counts[0], "median": middle, "max": counts[-1]}
        facts["entropy_bits_per_symbol"] = float(usage["entropy"].double().sum())
    return facts


def left_alone(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Tables that stay as they are, and why."""
    record = checkpoint.record
    taken = set(keys_of(checkpoint.weights, record.names() if record else ()))
    rest = {k: t for k, t in checkpoint.weights.items() if k not in taken and t.dim() == 2}
    twins = {
        f"{other}.weight": f"{found.path}.weight"
        for found in token_tables(rest, checkpoint.model_cfg)
        for other in [*found.paths[1:], *found.tied]
    }
    out = []
    for key, tensor in rest.items():
        if _POSITIONS.search(key):
            kind, why = "positions", "positions, not tokens"
        elif key in twins:
            kind, why = "tied", f"tied, the same bytes as {twins[key]}"
        elif _TOKENS.search(key):
            kind, why = "table", "a full table: not among --dpq-embeddings"
        elif _OUTPUT.search(key):
            kind, why = "output", "an output layer with weights of its own"
        else:
            continue
        facts = {"name": key, "kind": kind, "shape": list(tensor.shape), "why": why}
        out.append({**facts, "bytes": tensor.numel() * tensor.element_size()})
    return out


def run_of(checkpoint: Checkpoint) -> Any:
    """What the checkpoints of one training have in common, and those of two hardly ever."""
    cfg = checkpoint.state.get("cfg")
    options = [("checkpoint", "save_dir"), ("common", "seed"), ("task", "data")]
    own = [str(get_option(get_option(cfg, section), key)) for section, key in options]
    tables = checkpoint.dpq_record().tables.items()
    shapes = {path: (*table.size[:2], table.options) for path, table in tables}
    return [*own, get_option(checkpoint.model_cfg, "arch"), shapes]


def could_follow(
    left: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]
) -> list[Left]:
    """The tables and output layers among what was left alone that could be compressed too, at the
    ratio that the first table has."""
    ratio = max(tables[0]["measured_cr"], 1) if tables else 1
    full = [item for item in left if item["kind"] == "table"]
    shapes = [(table["num_embeddings"], table["embedding_dim"]) for table in tables]
    shapes += [tuple(item["shape"]) for item in full]
    how = "--dpq-embeddings all"
    out = [Left(item["name"], item["bytes"], int(item["bytes"] / ratio), how) for item in full]
    for item in left:
        if item["kind"] == "output" and tuple(item["shape"]) in shapes:
            layer = item["name"].rsplit(".", 2)[-2]
            out.append(Left(item["name"], item["bytes"], 0, TIED_BY[layer]))
    return out
