"""Which symbols the report shows, their codes and neighbours, beside those of a full table."""

from __future__ import annotations

from typing import Any, Sequence

from fairseq_dpq.files.checkpoint import Progress
from fairseq_dpq.files.errors import CheckpointError, printable
from fairseq_dpq.report.models import Model, TableView
from fairseq_dpq.report.neighbours import nearest, overlap, steps

CHOSEN = 8  # symbols, if none are given


def chosen_words(tables: Sequence[TableView], given: Sequence[str]) -> list[str]:
    """The given symbols that some table has, or common words spread over the first thousands."""
    if given:
        return [word for word in given if any(_row(table, word) is not None for table in tables)]
    table = next((table for table in tables if table.symbols is not None), tables[0])
    first = [row for row in range(min(table.n, 20_000)) if row != table.padding_idx]
    rows = [row for row in first if _is_word(table.symbol(row))] or first
    # Spread by rank: half of them among the most common, as frequencies are.
    places = [int(len(rows) ** (place / CHOSEN)) - 1 for place in range(2, CHOSEN + 2)]
    picked = dict.fromkeys(rows[min(max(place, 0), len(rows) - 1)] for place in places if rows)
    return [table.symbol(row) for row in picked]


def _is_word(symbol: str) -> bool:
    text = symbol.lstrip("▁Ġ")
    return len(text) >= 3 and text.isalpha() and not symbol.endswith("@@")


def _row(table: TableView, word: str) -> int | None:
    """The row of a symbol; without a dictionary, a row is named by its number."""
    if table.symbols is None:
        number = word[1:] if word.startswith("#") else word
        row = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1
        return row if 0 <= row < table.n else None
    return table.row_of().get(word)


def missing_words(tables: Sequence[TableView], given: Sequence[str]) -> list[str]:
    """Given symbols that no table has; if that is all of them, an error."""
    out = [word for word in given if not any(_row(t, word) is not None for t in tables)]
    if given and tables and len(out) == len(given):
        have = any(table.symbols is not None for table in tables)
        hint = "" if have else "; there is no dictionary: add --dict FILE, or give row numbers"
        raise CheckpointError(f"--words {printable(' '.join(out))}: no table has them{hint}")
    return out


def word_facts(
    models: Sequence[Model],
    path: str,
    words: Sequence[str],
    reference: Model | None,
    k: int,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Codes and neighbours of each word in each model that has the table."""
    out: list[dict[str, Any]] = [{"word": word, "models": {}} for word in words]
    for model in models:
        table = model.table(path)
        if table is None:
            continue
        places = {word: _row(table, word) for word in words}
        rows = {word: row for word, row in places.items() if row is not None}
        asked = list(rows.values())
        total = steps(table.n, len(asked))
        report = progress(f"neighbours in {path}", total) if progress is not None else None
        found = nearest(table.rows, table.n, asked, k, table.padding_idx, report)
        for at, (word, row) in enumerate(rows.items()):
            facts: dict[str, Any] = {"row": row}
            if table.parts is not None:
                facts["codes"] = table.codes()[row].tolist()
            facts["neighbours"] = [
                {"symbol": table.symbol(other), "row": other, "cosine": round(cosine, 4)}
                for other, cosine in found.pairs(at)
            ]
            out[list(words).index(word)]["models"][model.name] = facts
    if reference is not None:
        _add_overlap(out, reference.name)
    return out


def _add_overlap(words: list[dict[str, Any]], reference: str) -> None:
    for word in words:
        if reference not in word["models"]:
            continue
        wanted = [entry["symbol"] for entry in word["models"][reference]["neighbours"]]
        for name, facts in word["models"].items():
            if name != reference:
                ours = [entry["symbol"] for entry in facts["neighbours"]]
                facts["overlap"] = overlap(ours, wanted)
