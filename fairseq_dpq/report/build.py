"""All numbers of a report as plain data: what report.json holds and the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.forms.base import Parts
from fairseq_dpq.report.models import Model, Progress, TableView, silent, whole_model
from fairseq_dpq.report.numbers import code_change, code_use, query_distances, shared_codes
from fairseq_dpq.report.words import chosen_words, missing_words, word_facts
from fairseq_dpq.runs.logs import Curves
from fairseq_dpq.training.codes import code_counts
from fairseq_dpq.version import __version__


def build_report(
    models: Sequence[Model],
    *,
    words: Sequence[str] = (),
    reference: Model | None = None,
    curves: dict[str, Curves] | None = None,
    neighbours: int = 10,
    progress: Progress = silent,
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
    missing = missing_words(everything, words)
    report["notes"] += [f"no table has the symbol {word}" for word in missing]
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
            whole_model(model)


def _model(model: Model, progress: Progress) -> dict[str, Any]:
    return {
        "name": model.name,
        "file": str(model.path),
        "kind": model.kind,
        "updates": model.updates,
        "sizes": model.sizes,
        "tables": [_table(table, progress) for table in model.tables],
    }


def _table(table: TableView, progress: Progress) -> dict[str, Any]:
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
    done = progress(f"codes of {table.path}", 3 * table.n)
    codes, K = table.codes, max(parts.sizes)
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
    before: dict[tuple[Path, str], tuple[Model, TableView, Parts]] = {}
    for model in models:
        table = model.table(path)
        if table is None or table.parts is None or not table.options:
            continue
        run = (model.path.absolute().parent, str(sorted(table.options.items())))
        if run in before:
            last, old, parts = before[run]
            if parts.sizes == table.parts.sizes and old.n == table.n:
                change = code_change(old.codes, table.codes, parts.sizes)
                ends = {"from": last.name, "to": model.name, "updates": model.updates}
                out.append({"table": path, **ends, **change})
        before[run] = model, table, table.parts
    return out
