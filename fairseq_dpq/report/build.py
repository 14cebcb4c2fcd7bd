"""All numbers of a report as plain data: what report.json holds and the page shows. What a table's
codes say (their use, symbols that share them, change, distance of queries) is the analysis of the
paper's appendix C."""

from __future__ import annotations

import math
from typing import Any, Sequence

import numpy
import torch
from torch import Tensor

from fairseq_dpq.files.errors import CheckpointError, printable
from fairseq_dpq.files.progress import bar
from fairseq_dpq.forms.packing import code_bits, pack_codes
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.report.models import Model, TableView
from fairseq_dpq.report.words import chosen_words, word_facts
from fairseq_dpq.runs.logs import Curves
from fairseq_dpq.training.codes import code_counts, look_up, usage_of_counts
from fairseq_dpq.version import __version__

_SIZES = ("full_bytes", "compact_bytes", "formula_cr", "measured_cr", "bits_per_symbol")
_ROWS = 1 << 13  # rows handled at once
_BINS = 40
SAMPLE = 100_000  # queries whose distance is measured


def build_report(
    models: Sequence[Model],
    *,
    words: Sequence[str] = (),
    reference: Model | None = None,
    curves: dict[str, Curves] | None = None,
    neighbours: int = 10,
) -> dict[str, Any]:
    """The numbers of all models; `reference` is the one whose neighbours others are compared to."""
    _keep_tables(models)
    if reference is None:
        reference = next((model for model in models if model.kind == "full"), None)
    tables = [table for model in models for table in model.tables]
    paths = list(dict.fromkeys(table.path for table in tables))
    notes = [f"{model.name}: {note}" for model in models for note in model.notes]
    filled = [table for table in tables if table.n]
    if words and filled:
        known = chosen_words(filled, words)
        if not known:
            have = any(table.symbols is not None for table in filled)
            hint = "" if have else "; there is no dictionary: add --dict FILE, or give row numbers"
            raise CheckpointError(f"--words {printable(' '.join(words))}: no table has them{hint}")
        notes += [f"no table has the symbol {word}" for word in words if word not in known]
    shown = {}
    for path in paths:
        own = [table for table in filled if table.path == path]
        if own:
            chosen = chosen_words(own, words)
            shown[path] = word_facts(models, path, chosen, reference, neighbours)
    return {
        "written_by": f"fairseq-dpq {__version__}",
        "models": [_model(model) for model in models],
        "reference": None if reference is None else reference.name,
        "tables": paths,
        "words": shown,
        "changes": [change for path in paths for change in _changes(models, path)],
        "curves": curves or {},
        "notes": notes,
    }


def _keep_tables(models: Sequence[Model]) -> None:
    """Beside DPQ models, a full model shows the tables that those have."""
    compressed = {table.path for model in models for table in model.tables if table.form}
    for model in models:
        kept = [table for table in model.tables if table.path in compressed]
        if model.kind == "full" and kept:
            model.tables = kept


def _model(model: Model) -> dict[str, Any]:
    facts = {"name": model.name, "file": str(model.path), "kind": model.kind}
    tables = [_table(model, table) for table in model.tables]
    return {**facts, "updates": model.updates, "sizes": model.sizes, "tables": tables}


def _table(model: Model, table: TableView) -> dict[str, Any]:
    known = (*_SIZES, "description", "stored_bytes")
    facts: dict[str, Any] = {
        "path": table.path,
        "num_embeddings": table.n,
        "embedding_dim": table.d,
        "padding_idx": table.padding_idx,
        "symbols": table.symbols is not None,
        "sizes": {name: table.facts[name] for name in known if name in table.facts},
    }
    parts = table.parts
    if parts is None:
        return facts
    with bar(f"codes of {table.path}", 3 * table.n) as done:
        codes, K = table.codes, max(parts.sizes)
        counts = code_counts(codes, K, table.padding_idx)
        done.update(table.n)
        facts.update(K=K, D=len(parts.sizes), shared_values=parts.shared)
        facts["use"] = {**code_use(counts, parts.sizes), "counts": counts.tolist()}
        facts["shared"] = shared_codes(codes, parts.sizes, table.padding_idx)
        done.update(table.n)
        for group in facts["shared"]["largest_sets"]:
            group["symbols"] = [table.symbol(row) for row in group["ids"]]
        facts["distances"] = None
        if model.kind == "training" and model.checkpoint:
            facts["distances"] = query_distances(model.checkpoint.layer(table.path), codes)
        done.update(table.n)
    return facts


def _changes(models: Sequence[Model], path: str) -> list[dict[str, Any]]:
    """From each checkpoint to the next one of the same run, in the order given."""
    out = []
    before: dict[Any, tuple[Model, TableView]] = {}
    for model in models:
        table = model.table(path)
        if table is None or table.parts is None or not table.options:
            continue
        sizes, options = table.parts.sizes, str(sorted(table.options.items()))
        run = (model.path.absolute().parent, options, table.n, tuple(sizes))
        if run in before:
            last, old = before[run]
            ends = {"from": last.name, "to": model.name, "updates": model.updates}
            out.append({"table": path, **ends, **code_change(old.codes, table.codes, sizes)})
        before[run] = model, table
    return out


# What codes say ----------------------------------------------------------------------------------


def code_use(counts: Tensor, sizes: Sequence[int]) -> dict[str, Any]:
    """Codes in use and entropy of each group, and their means."""
    used, entropy = usage_of_counts(counts).values()
    return {
        "used": used.tolist(),
        "sizes": list(sizes),
        "entropy_bits": [round(x, 4) + 0.0 for x in entropy.tolist()],
        "used_share": float(used.sum()) / max(sum(sizes), 1),
        "entropy_bits_per_symbol": float(entropy.sum()) + 0.0,
        "possible_bits_per_symbol": sum(map(math.log2, sizes)),
    }


def shared_codes(codes: Tensor, sizes: Sequence[int], padding_idx: int | None) -> dict[str, Any]:
    """Symbols that have all their codes in common with another one, padding left out."""
    ids = numpy.arange(codes.shape[0])
    if padding_idx is not None:
        ids = numpy.delete(ids, padding_idx)
    packed = pack_codes(codes, [code_bits(size) for size in sizes]).numpy()[ids]
    packed = numpy.ascontiguousarray(packed)
    rows = packed.view(numpy.dtype((numpy.void, packed.shape[1]))).reshape(-1)
    _, inverse, counts = numpy.unique(rows, return_inverse=True, return_counts=True)
    several = numpy.flatnonzero(counts > 1)
    largest = several[numpy.argsort(-counts[several], kind="stable")][:5]
    members = [ids[numpy.flatnonzero(inverse.reshape(-1) == number)[:8]] for number in largest]
    return {
        "symbols": len(ids),
        "distinct": len(counts),
        "sharing": int(counts[several].sum()),
        "largest": int(counts.max()) if len(counts) else 0,
        "largest_sets": [
            {"size": int(counts[number]), "ids": some.tolist()}
            for number, some in zip(largest, members)
        ],
    }


def code_change(old: Tensor, new: Tensor, sizes: Sequence[int]) -> dict[str, float]:
    """Shares of codes, of symbols with such a code, and of code bits that differ."""
    codes = symbols = flipped = 0
    widest = max(code_bits(size) for size in sizes)
    for start in range(0, old.shape[0], _ROWS):
        a, b = old[start : start + _ROWS].long(), new[start : start + _ROWS].long()
        differ = a ^ b
        codes += int((differ != 0).sum())
        symbols += int((differ != 0).any(1).sum())
        flipped += sum(int(((differ >> bit) & 1).sum()) for bit in range(widest))
    bits = old.shape[0] * sum(code_bits(size) for size in sizes)
    return {
        "codes": codes / max(old.numel(), 1),
        "symbols": symbols / max(old.shape[0], 1),
        "bits": flipped / max(bits, 1),
    }


@torch.no_grad()
def query_distances(layer: DPQEmbedding, codes: Tensor) -> dict[str, Any] | None:
    """How far queries are from the centroids (keys) of their codes, in units of the query's own
    length: 0 on the centroid, 1 as far as the origin. None for a method without keys."""
    by_group = getattr(layer.method, "by_group", None)  # of methods that compare with keys
    if by_group is None:
        return None
    ids = torch.arange(layer.num_embeddings)
    if layer.padding_idx is not None:
        ids = ids[ids != layer.padding_idx]
    total = len(ids)
    if total > SAMPLE:
        ids = ids[torch.linspace(0, total - 1, SAMPLE).long()]
    keys = layer.codebook().keys.double()  # the square of a float may be beyond a float
    found: dict[str, list[Tensor]] = {"relative": [], "distance": [], "cosine": []}
    for some in ids.split(_ROWS):
        query = by_group(layer.query[some], layer.config).double()  # (rows, D, key size)
        centroid = look_up(keys, codes[some].long())
        distance = (query - centroid).pow(2).sum(-1)  # (rows, D)
        length = query.pow(2).sum(-1)
        found["distance"].append(distance.sqrt().mean(1))
        found["relative"].append((distance.sum(1) / length.sum(1).clamp_min(1e-30)).sqrt())
        found["cosine"].append(torch.cosine_similarity(query, centroid, dim=-1).mean(1))
    spreads = {name: _spread(torch.cat(parts), name == "relative") for name, parts in found.items()}
    return {"symbols": total, "measured": len(ids), **spreads}


def _spread(values: Tensor, histogram: bool) -> dict[str, Any]:
    """Mean and quantiles; a histogram up to the 99th percentile, what is beyond in the last bin."""
    numbers = values.numpy()
    if not len(numbers):
        return {"mean": None, "median": None, "p90": None}
    out: dict[str, Any] = {
        "mean": float(numbers.mean()),
        "median": float(numpy.median(numbers)),
        "p90": float(numpy.quantile(numbers, 0.9)),
    }
    if histogram:
        top = max(float(numpy.quantile(numbers, 0.99)), 1e-12)
        counts, edges = numpy.histogram(numpy.minimum(numbers, top), bins=_BINS, range=(0, top))
        out["histogram"] = {"counts": counts.tolist(), "edges": edges.tolist()}
    return out
