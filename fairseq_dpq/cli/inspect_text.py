"""The report of fairseq-dpq-inspect as text: one table for all files, at most 100 columns wide."""

from __future__ import annotations

import os
from typing import Any, Sequence

from fairseq_dpq.cli.common import left_text, notes, size, used_codes
from fairseq_dpq.files.errors import printable
from fairseq_dpq.size_report import Change, Left, outlook, size_lines, text_table
from fairseq_dpq.sizes import bits_note

WIDTH = 100
_TOKENS = ".embed_tokens"
_LEAST = 8  # columns that a shortened name keeps


def report(files: Sequence[dict[str, Any]], left: Sequence[list[Left]], K: int, D: int) -> str:
    """All files; `left` is what could be compressed too in each, K and D are for full tables."""
    names = _short_names([facts["checkpoint"] for facts in files])
    lines = [_headline(facts) for facts in files] if len(files) == 1 else []
    rows = [row for name, facts in zip(names, files) for row in _rows(name, facts, K, D)]
    if rows:
        head = ["file", "embedding", "table", "stored as", "compact", "CR", "entropy"]
        table = [[*head, "used codes", "changed"], *rows]
        # With several files the shape of a table gives way to the file.
        dropped = 0 if len(files) == 1 else 2
        table = [row[:dropped] + row[dropped + 1 :] for row in table]
        if len(files) > 1 and all(row[1].endswith(_TOKENS) for row in table[1:]):
            for row in table[1:]:
                row[1] = row[1][: -len(_TOKENS)]
        lines.append(fitted(table, 2))
    if len(files) == 1:
        lines += _notes(files[0], K)
        lines += _sizes(files[0], left[0])
    else:
        lines += ["", fitted([_SIZES, *map(_size_row, names, files)], 1)]
        for name, facts in zip(names, files):
            lines += [f"{name}: {line}" for line in _problems(facts)]
    if any(facts.get("other_run") for facts in files):
        lines.append("changed: only between checkpoints of one run")
    return "\n".join(lines)


def _headline(facts: dict[str, Any]) -> str:
    line = f"{printable(facts['checkpoint'])}: {facts['form']} form"
    if facts.get("source"):
        line += f", made of {printable(facts['source'])}"
    return line


def _rows(name: str, facts: dict[str, Any], K: int, D: int) -> list[list[str]]:
    rows = []
    for table in facts["embeddings"]:
        changed, entropy = table.get("changed"), table.get("entropy_bits_per_symbol")
        known = "error" not in table
        rows.append(
            [
                name,
                table["path"],
                f"{table['num_embeddings']} x {table['embedding_dim']}",
                _stored_as(table, K, D),
                size(table["compact_bytes"]) if known else "-",
                f"{table['measured_cr']:.2f}" if known else "-",
                "-" if entropy is None else f"{entropy:.1f}",
                used_codes(table.get("used_codes")),
                "-" if changed is None else f"{100 * changed['codes']:.2f} %",
            ]
        )
    return rows


def _stored_as(table: dict[str, Any], K: int, D: int) -> str:
    if "description" not in table:
        return f"full, at K={K} D={table.get('D', D)}"
    return table["description"]


def _problems(facts: dict[str, Any]) -> list[str]:
    """What the table has no figures for."""
    lines = [] if facts["embeddings"] else ["no token embedding found"]
    failed = [table for table in facts["embeddings"] if "error" in table]
    return lines + [printable(f"{table['path']}: {table['error']}") for table in failed]


def _notes(facts: dict[str, Any], K: int) -> list[str]:
    lines = _problems(facts)
    for table in facts["embeddings"]:
        lines += notes(table)
    if facts["form"] == "full" and facts["embeddings"] and bits_note(K):
        lines.append(bits_note(K))
    return lines + [printable(f"not DPQ: {left_text(item)}") for item in facts["left_alone"]]


def _sizes(facts: dict[str, Any], left: list[Left]) -> list[str]:
    """The three lines of one file."""
    sizes = facts.get("sizes")
    if sizes is None:
        return []
    embeddings = Change(sizes["embeddings"]["before"], sizes["embeddings"]["after"])
    model = Change(sizes["model"]["before"], sizes["model"]["after"]) if "model" in sizes else None
    optimizer = facts["optimizer_bytes"]
    note = f"{size(optimizer)} of them optimiser state" if optimizer else ""
    file = Change(facts["file_bytes"], facts["file_bytes"])
    lines = ["", *size_lines(embeddings, model, file, note)]
    if facts["form"] in ("training", "full"):
        lines.append("(embeddings and model as they would be once compact)")
    return lines + [printable(line) for line in (outlook(model, left) if model else [])]


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
