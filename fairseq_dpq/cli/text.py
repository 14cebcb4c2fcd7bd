"""What the tools print: tables of text, lines on sizes, and for several files one table of at most
100 columns."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, Mapping, Sequence

from fairseq_dpq.files.errors import printable
from fairseq_dpq.files.tables import could_follow
from fairseq_dpq.size_report import Change, outlook, size_lines, text_table

WIDTH = 100
_TOKENS = ".embed_tokens"
_LEAST = 8  # columns that a shortened name keeps
_USED = "{used_codes[min]}/{used_codes[median]}/{used_codes[max]}"
_COLUMNS = {  # what they show of the facts about a table
    "embedding": "{path}",
    "table": "{num_embeddings} x {embedding_dim}",
    "stored as": "{description}",
    "full": "{full_bytes:,}",
    "trained": "{training_bytes:,}",
    "compact": "{compact_bytes:,}",
    "CR formula": "{formula_cr:.2f}",
    "CR measured": "{measured_cr:.2f}",
    "CR": "{measured_cr:.2f}",
    "bits/symbol": "{bits_per_symbol}",
    "squared error": "{relative_error:.2%}",
    "entropy": "{entropy_bits_per_symbol:.1f}",
    "used codes": _USED,
    "used codes min/median/max": _USED,
    "changed": "{changed[codes]:.2%}",
}


def size(number: int) -> str:
    """A number of bytes, exactly."""
    return f"{number:,}"


def _cell(table: Mapping[str, Any], column: str) -> str:
    template = _COLUMNS[column]
    try:
        text = template.format_map(table)
    except (KeyError, TypeError):  # nothing is known of that
        return "-"
    return text.replace("%", " %") if template.endswith("%}") else text


def _rows(tables: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    return [[_cell(table, column) for column in columns] for table in tables]


def _notes(table: Mapping[str, Any], stored: str = "") -> list[str]:
    """What the columns do not say of a table: other names, tied outputs, a size that grew."""
    lines = []
    also = [f"also {name}" for name in table["aliases"]]
    also += [f"tied to {name}" for name in table.get("tied_outputs", [])]
    if also:
        lines.append(f"{table['path']}: {', '.join(also)}{stored}")
    lines += [f"{table['path']}: {note}" for note in table.get("notes", [])]
    if table.get("measured_cr", 1) < 1:
        lines.append(
            f"{table['path']}: larger than the full table; take a smaller --dpq-D or --dpq-K, or "
            "--dpq-share-subspaces"
        )
    return lines


def _left(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tables that stay as they are."""
    return [f"{item['name']}, {size(item['bytes'])} bytes: {item['why']}" for item in items]


# One file that was written ------------------------------------------------------------------------


def print_written(
    args: argparse.Namespace,
    facts: dict[str, Any],
    sizes: Mapping[str, Change],
    columns: Sequence[str],
    *,
    left: str,
    stored: str = "",
    about_file: str = "",
    notes: Sequence[str] = (),
    more: Sequence[str] = (),
    headline: str = "",
) -> None:
    """What a tool has made of a checkpoint, as JSON or text. `left` leads the lines on tables that
    stay as they are, `stored` ends those on names of one table, `headline` goes on after the name
    of the file."""
    facts["sizes"] = {name: change.facts() for name, change in sizes.items()}
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    tables, others = facts["embeddings"], facts["left_alone"]
    lines = [line for table in tables for line in _notes(table, stored)]
    lines += [f"{left}: {line}" for line in _left(others)] + list(notes)
    lines += [""] if lines else []
    lines += size_lines(sizes["embeddings"], sizes["model"], sizes["file"], about_file)
    lines += [*outlook(sizes["model"], could_follow(others, tables)), *more, ""]
    lines.append(f"{facts['output']}{headline}")
    print(text_table([columns, *_rows(tables, columns)]), "", *map(printable, lines), sep="\n")


# Files that are there -----------------------------------------------------------------------------


def report(files: Sequence[dict[str, Any]]) -> str:
    """All files of fairseq-dpq-inspect."""
    names = _short_names([facts["checkpoint"] for facts in files])
    single = len(files) == 1
    lines = [_headline(facts) for facts in files] if single else []
    # With several files the shape of a table gives way to the file.
    columns = ["embedding", *(["table"] if single else []), "stored as", "compact", "CR"]
    columns += ["entropy", "used codes", "changed"]
    rows = []
    for name, facts in zip(names, files):
        own = _rows(facts["embeddings"], columns)
        rows += own if single else [[name, *row] for row in own]
    if rows and not single and all(row[1].endswith(_TOKENS) for row in rows):
        rows = [[row[0], row[1][: -len(_TOKENS)], *row[2:]] for row in rows]
    if rows:
        lines.append(fitted([columns if single else ["file", *columns], *rows], 2))
    said: list[str] = []
    if single:
        said += _problems(files[0])
        said += [line for table in files[0]["embeddings"] for line in _notes(table)]
        said += [f"not DPQ: {line}" for line in _left(files[0]["left_alone"])]
        said += _sizes(files[0])
    else:
        lines += ["", fitted([_SIZES, *map(_size_row, names, files)], 1)]
        for name, facts in zip(names, files):
            said += [f"{name}: {line}" for line in _problems(facts)]
    lines += map(printable, said)
    if any(facts.get("other_run") for facts in files):
        lines.append("changed: only between checkpoints of one run")
    return "\n".join(lines)


def _headline(facts: dict[str, Any]) -> str:
    source = f", made of {facts['source']}" if facts.get("source") else ""
    return printable(f"{facts['checkpoint']}: {facts['form']} form{source}")


def _problems(facts: dict[str, Any]) -> list[str]:
    """What the table has no figures for."""
    lines = [] if facts["embeddings"] else ["no token embedding found"]
    failed = [table for table in facts["embeddings"] if "error" in table]
    return lines + [f"{table['path']}: {table['error']}" for table in failed]


def _sizes(facts: dict[str, Any]) -> list[str]:
    """The three lines of one file."""
    sizes = facts.get("sizes")
    if sizes is None:
        return []
    changes = {name: Change(own["before"], own["after"]) for name, own in sizes.items()}
    model = changes.get("model")
    optimizer = facts["optimizer_bytes"]
    note = f"{size(optimizer)} of them optimiser state" if optimizer else ""
    file = Change(facts["file_bytes"], facts["file_bytes"])
    lines = ["", *size_lines(changes["embeddings"], model, file, note)]
    if facts["form"] in ("training", "full"):
        lines.append("(embeddings and model as they would be once compact)")
    left = could_follow(facts["left_alone"], facts["embeddings"])
    return lines + (outlook(model, left) if model else [])


_SIZES = ["file", "form", "embeddings", "ratio", "model", "ratio", "file bytes"]


def _size_row(name: str, facts: dict[str, Any]) -> list[str]:
    row = [name, facts["form"]]
    for what in ("embeddings", "model"):
        sizes = (facts.get("sizes") or {}).get(what)
        row += [size(sizes["after"]), f"{sizes['ratio']:.2f}"] if sizes else ["-", "-"]
    return [*row, size(facts["file_bytes"])]


def _short_names(paths: list[str]) -> list[str]:
    """Paths without the folder that all have in common."""
    if len(paths) < 2:
        return [printable(path) for path in paths]
    common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    return [printable(os.path.relpath(os.path.abspath(path), common)) for path in paths]


def fitted(rows: list[list[str]], names: int) -> str:
    """Rows as text of at most `WIDTH` columns: the first `names` columns are shortened, then the
    next one."""
    rows = [[printable(cell) for cell in row] for row in rows]
    for last in (names, names + 1):
        while True:
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            widest = max(range(last), key=lambda i: widths[i])
            over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
            if over <= 0:
                return text_table(rows)
            if widths[widest] <= _LEAST:
                break
            for row in rows:
                row[widest] = _shorter(row[widest], max(_LEAST, widths[widest] - 1))
    return text_table(rows)


def _shorter(text: str, width: int) -> str:
    """The end of a text, which tells names apart, if it is too long."""
    if len(text) <= width:
        return text
    return ".." + text.lstrip(".")[-(width - 2) :]
