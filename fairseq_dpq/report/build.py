"""All numbers of a report as plain data: what report.json holds and the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.files.checkpoint import Progress
from fairseq_dpq.report.curves import Curves
from fairseq_dpq.report.models import Model, TableView
from fairseq_dpq.report.numbers import (
    code_change,
    code_use,
    query_distances,
    shared_codes,
)
from fairseq_dpq.report.words import chosen_words, missing_words, word_facts
from fairseq_dpq.training.codes import code_counts
from fairseq_dpq.version import __version__


def build_report(
    models: Sequence[Model],
    *,
    words: Sequence[str] = (),
    reference: Model | None = None,
    curves: dict[str, Curves] | None = None,
    neighbours: int = 10,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The numbers of all models; `reference` is the one whose neighbours others are compared to."""
    keep_tables(models)
    if reference is None:
        reference = next((model for model in models if model.kind == "full"), None)
    paths = list(dict.fromkeys(table.path for model in models for table in model.tables))
    report: dict[str, Any] = {
        "written_by": f"fairseq-dpq {__version__}",
        "models": [_model(model, progress) for model in models],
        "reference": None if reference is None else reference.name,
        "tables": paths,
        "words": {},
        "changes": [change for path in paths for change in _changes(models, path)],
        "curves": curves or {},
        "notes": [f"{model.name}: {note}" for model in models for note in model.notes],
    }
    everything = [table for model in models for table in model.tables if table.n]
    for word in missing_words(everything, words):
        report["notes"].append(f"no table has the symbol {word}")
    for path in paths:
        tables = [table for table in everything if table.path == path]
        if tables:
            chosen = chosen_words(tables, words)
            facts = word_facts(models, path, chosen, reference, neighbours, progress)
            report["words"][path] = facts
    return report


def keep_tables(models: Sequence[Model]) -> None:
    """Beside DPQ models, a full model shows the tables that those have."""
    compressed = {table.path for model in models for table in model.tables if table.form}
    for model in models:
        if model.kind == "full" and any(table.path in compressed for table in model.tables):
            model.tables = [table for table in model.tables if table.path in compressed]
            model.sizes["embedding_bytes"] = sum(t.sizes["stored_bytes"] for t in model.tables)
            model.sizes["full_embedding_bytes"] = sum(t.sizes["full_bytes"] for t in model.tables)


def _model(model: Model, progress: Progress | None) -> dict[str, Any]:
    return {
        "name": model.name,
        "file": str(model.path),
        "kind": model.kind,
        "updates": model.updates,
        "sizes": model.sizes,
        "tables": [_table(table, progress) for table in model.tables],
    }


def _table(table: TableView, progress: Progress | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": table.path,
        "num_embeddings": table.n,
        "embedding_dim": table.d,
        "padding_idx": table.padding_idx,
        "symbols": table.symbols is not None,
        "sizes": table.sizes,
    }
    parts = table.parts
    if parts is None:
        return facts
    done = progress(f"codes of {table.path}", 3 * table.n) if progress else lambda rows: None
    codes, K = table.codes(), max(parts.sizes)
    counts = code_counts(codes, K, table.padding_idx)
    done(table.n)
    facts.update(K=K, D=len(parts.sizes), shared_values=parts.shared)
    facts["use"] = {**code_use(counts, parts.sizes), "counts": counts.tolist()}
    facts["shared"] = shared_codes(codes, parts.sizes, table.padding_idx)
    done(table.n)
    for group in facts["shared"]["largest_sets"]:
        group["symbols"] = [table.symbol(row) for row in group["ids"]]
    facts["distances"] = None if table.layer is None else query_distances(table.layer, codes)
    done(table.n)
    return facts


def _changes(models: Sequence[Model], path: str) -> list[dict[str, Any]]:
    """From each checkpoint to the next one of the same run, in the order given."""
    out = []
    before: dict[tuple[Path, str], Model] = {}
    for model in models:
        table = model.table(path)
        if table is None or table.parts is None or not table.options:
            continue
        run = (model.path.absolute().parent, str(sorted(table.options.items())))
        last = before.get(run)
        old = None if last is None else last.table(path)
        if last is not None and old is not None and old.parts is not None:
            sizes = table.parts.sizes
            if old.parts.sizes == sizes and old.n == table.n:
                change = code_change(old.codes(), table.codes(), sizes)
                ends = {"from": last.name, "to": model.name, "updates": model.updates}
                out.append({"table": path, **ends, **change})
        before[run] = model
    return out
