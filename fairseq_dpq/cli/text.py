"""What the tools print: facts as JSON, or tables of text and lines on sizes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Mapping, Sequence

from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import printable
from fairseq_dpq.files.tables import could_follow, left_alone
from fairseq_dpq.size_report import Change, outlook, size_lines, text_table

WIDTH = 100
_TOKENS = ".embed_tokens"
_LEAST = 8  # columns that a shortened name keeps
_USED = "{used_codes[min]}/{used_codes[median]}/{used_codes[max]}"
_WRITTEN = {  # of a file that was written: columns, and what they show of the facts about a table
    "embedding": "{path}",
    "table": "{num_embeddings} x {embedding_dim}",
    "stored as": "{description}",
    "full": "{full_bytes:,}",
    "trained": "{training_bytes:,}",
    "compact": "{compact_bytes:,}",
    "CR formula": "{formula_cr:.2f}",
    "CR measured": "{measured_cr:.2f}",
    "bits/symbol": "{bits_per_symbol}",
    "squared error": "{relative_error:.2%}",
    "used codes min/median/max": _USED,
}
_THERE = {  # of files that are there
    **{name: _WRITTEN[name] for name in ("embedding", "table", "stored as", "compact")},
    "CR": "{measured_cr:.2f}",
    "entropy": "{entropy_bits_per_symbol:.1f}",
    "used codes": _USED,
    "changed": "{changed[codes]:.2%}",
}


def print_json(facts: Any) -> None:
    """Print facts, sizes among them, as JSON."""
    print(json.dumps(facts, indent=2, default=Change.facts))


def _cell(table: Mapping[str, Any], template: str) -> str:
    try:
        text = template.format_map(table)
    except (KeyError, TypeError):  # nothing is known of that
        return "-"
    return text.replace("%", " %") if template.endswith("%}") else text


def _rows(tables: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[list[str]]:
    return [[_cell(table, template) for template in columns.values()] for table in tables]


def _notes(table: Mapping[str, Any]) -> list[str]:
    """What the columns do not say of a table: other names, tied outputs, a size that grew."""
    also = [f"also {name}" for name in table["aliases"]]
    also += [f"tied to {name}" for name in table.get("tied_outputs", [])]
    notes = [", ".join(also)] if also else []
    notes += table.get("notes", [])
    if table.get("measured_cr", 1) < 1:
        notes.append(
            "larger than the full table; take a smaller --dpq-D or --dpq-K, or "
            "--dpq-share-subspaces"
        )
    return [f"{table['path']}: {note}" for note in notes]


def _left(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tables that stay as they are."""
    return [f"left full: {item['name']}, {item['bytes']:,} bytes: {item['why']}" for item in items]


# One file that was written ------------------------------------------------------------------------


def print_written(
    args: argparse.Namespace,
    origin: Checkpoint,
    new: Checkpoint,
    tables: list[dict[str, Any]],
    *,
    facts: Mapping[str, Any],
    stage: str = "",
    verdict: str = "",
    about_file: str = "",
    notes: Sequence[str] = (),
) -> None:
    """What a tool has made of a checkpoint, as JSON or text. `facts` are the tool's own; `stage`
    and `verdict` stand in the last line, and `about_file` beside the size of the file."""
    full, small = (sum(table[name] for table in tables) for name in ("full_bytes", "compact_bytes"))
    stored = sum(table.get("stored_bytes", table["full_bytes"]) for table in tables)
    before = origin.other_bytes() + (full if origin.record else 0)
    model = Change(before, new.other_bytes() + small)
    file = Change(origin.file_bytes, new.file_bytes)
    sizes = {"embeddings": Change(stored, small), "model": model, "file": file}
    others = left_alone(new)
    if args.json:
        own = {"embeddings": tables, "left_alone": others, "sizes": sizes}
        return print_json({"output": str(new.path), **facts, **own})
    rows = [list(_WRITTEN), *_rows(tables, _WRITTEN)]
    known = [column for column in zip(*rows) if set(column[1:]) != {"-"}]
    lines = [line for table in tables for line in _notes(table)] + _left(others)
    lines += [""] if lines else []
    lines += size_lines(sizes["embeddings"], model, file, about_file)
    lines += [*outlook(model, could_follow(others, tables)), *notes, ""]
    lines.append(f"{new.path}{stage}: a model {model.smaller()}{verdict}")
    print(text_table([*zip(*known)]), "", *map(printable, lines), sep="\n")


# Files that are there -----------------------------------------------------------------------------


def report(files: Sequence[dict[str, Any]]) -> str:
    """All files of fairseq-dpq-inspect."""
    lines = _one(files[0]) if len(files) == 1 else _several(files)
    if any(facts.get("other_run") for facts in files):
        lines.append("changed: only between checkpoints of one run")
    return "\n".join(lines)


def _one(facts: dict[str, Any]) -> list[str]:
    """A table, and all that is known beside it."""
    source = f", made of {facts['source']}" if facts.get("source") else ""
    said = [f"{facts['checkpoint']}: {facts['form']} form{source}"]
    tables, others, sizes = facts["embeddings"], facts["left_alone"], facts.get("sizes")
    shown = [fitted([list(_THERE), *_rows(tables, _THERE)], 1)] if tables else []
    lines = _problems(facts) + [line for table in tables for line in _notes(table)] + _left(others)
    if sizes is not None:
        model, whole, optimizer = sizes.get("model"), facts["file_bytes"], facts["optimizer_bytes"]
        note = f"{optimizer:,} of them optimiser state" if optimizer else ""
        lines += ["", *size_lines(sizes["embeddings"], model, Change(whole, whole), note)]
        if facts["form"] in ("training", "full"):
            lines.append("(embeddings and model as they would be once compact)")
        lines += outlook(model, could_follow(others, tables)) if model else []
    return [*map(printable, said), *shown, *map(printable, lines)]


def _several(files: Sequence[dict[str, Any]]) -> list[str]:
    """One table of all, in which the shape of a table gives way to the file; then their sizes."""
    names = short_names([Path(facts["checkpoint"]) for facts in files])
    columns = {name: template for name, template in _THERE.items() if name != "table"}
    rows, lines, problems = [["file", *columns]], [], []
    sizes = [["file", "form", "embeddings", "ratio", "model", "ratio", "file bytes"]]
    for name, facts in zip(names, files):
        for path, *cells in _rows(facts["embeddings"], columns):
            rows.append([name, path.replace(_TOKENS, ""), *cells])
        row = [name, facts["form"]]
        for what in ("embeddings", "model"):
            change = (facts.get("sizes") or {}).get(what)
            row += [f"{change.after:,}", f"{change.ratio:.2f}"] if change else ["-", "-"]
        sizes.append([*row, f"{facts['file_bytes']:,}"])
        problems += [printable(f"{name}: {line}") for line in _problems(facts)]
    if len(rows) > 1:
        lines = [fitted(rows, 2)]
    return [*lines, "", fitted(sizes, 0), *problems]


def _problems(facts: dict[str, Any]) -> list[str]:
    """What the table has no figures for."""
    lines = [] if facts["embeddings"] else ["no token embedding found"]
    failed = [table for table in facts["embeddings"] if "error" in table]
    return lines + [f"{table['path']}: {table['error']}" for table in failed]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.absolute().parts for path in paths]
    names: list[str] = []
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def fitted(rows: list[list[str]], last: int) -> str:
    """Rows as text of at most `WIDTH` columns: the widest of the columns up to `last`, which hold
    names, is shortened as far as that is needed."""
    rows = [[printable(cell) for cell in row] for row in rows]
    while True:
        widths = [max(map(len, column)) for column in zip(*rows)]
        widest = max(range(last + 1), key=lambda i: widths[i])
        if sum(widths) + 2 * (len(widths) - 1) <= WIDTH or widths[widest] <= _LEAST:
            return text_table(rows)
        for row in rows:
            row[widest] = _shorter(row[widest], widths[widest] - 1)


def _shorter(text: str, width: int) -> str:
    """The end of a text, which tells names apart, if it is too long."""
    return text if len(text) <= width else ".." + text.lstrip(".")[-(width - 2) :]
