"""All numbers of a report as plain data: what report.json holds and the page shows."""

from __future__ import annotations

from typing import Any, Sequence

from fairseq_dpq.files.errors import CheckpointError, printable
from fairseq_dpq.files.progress import bar
from fairseq_dpq.report.models import Model, TableView
from fairseq_dpq.report.numbers import code_change, code_use, query_distances, shared_codes
from fairseq_dpq.report.words import chosen_words, word_facts
from fairseq_dpq.runs.logs import Curves
from fairseq_dpq.training.codes import code_counts
from fairseq_dpq.version import __version__

_SIZES = ("full_bytes", "compact_bytes", "formula_cr", "measured_cr", "bits_per_symbol")


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
