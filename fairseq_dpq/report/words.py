"""Which symbols the report shows, their codes, and their nearest neighbours by cosine, which are
found without holding the dense table; and what the page's search needs, packed."""

from __future__ import annotations

import base64
from typing import Any, Sequence

import numpy
import torch
from torch import Tensor

from fairseq_dpq.files.errors import printable
from fairseq_dpq.files.progress import bar
from fairseq_dpq.forms.base import Parts
from fairseq_dpq.forms.packing import code_bits, pack_codes, row_bytes
from fairseq_dpq.report.models import Model, TableView

LIMIT = 100_000  # symbols of a table that can be searched
BUDGET = 11_000_000  # characters of the page that all of it may take
_VALUES = 2_000_000  # bytes of values beyond which neighbours are worked out beforehand
_PAIRS = 50_000_000  # comparisons that are made beforehand: some seconds
_MULTIPLICATIONS = 20_000_000_000
CHOSEN = 8  # symbols, if none are given
_ROWS = 1 << 13  # rows compared at once
_QUERIES = 1 << 9
# Equal rows may differ by rounding: beyond this many digits the lower id is first.
_DIGITS = 10**6
_IDS = 1 << 32
_NONE = -(1 << 62)


@torch.no_grad()
def nearest(table: TableView, n: int, wanted: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of the first n rows for each of m wanted ones, without itself and padding: ids
    and cosines (m, k), best first; id -1 where there are fewer."""
    best = torch.full((len(wanted), k), _NONE)
    padding = -1 if table.padding_idx is None else table.padding_idx
    steps = n * -(-len(wanted) // _QUERIES)
    with bar(f"neighbours in {table.path}", steps) as done:
        for first in range(0, len(wanted), _QUERIES):
            part = slice(first, first + _QUERIES)
            some = torch.tensor(list(wanted[part]))
            query = _unit(table.rows(some))
            for other in torch.arange(n).split(_ROWS):
                cosine = (query @ _unit(table.rows(other)).t()).double()
                # One number to sort by: the cosine first, then the lower id.
                score = (cosine.nan_to_num() * _DIGITS).round().long() * _IDS - other
                score[(some[:, None] == other) | (other == padding)] = _NONE
                best[part] = torch.cat([best[part], score], 1).topk(k, 1).values
                done.update(len(other))
    missing = best == _NONE
    ids = (-best) % _IDS
    cosines = ((best + ids) // _IDS).double() / _DIGITS
    return ids.masked_fill(missing, -1), cosines.masked_fill(missing, 0)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.float(), dim=-1)


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
    return table.row_of.get(word)


def word_facts(
    models: Sequence[Model], path: str, words: Sequence[str], reference: Model | None, k: int
) -> list[dict[str, Any]]:
    """Codes and neighbours of each word in each model that has the table."""
    out: dict[str, dict[str, Any]] = {word: {} for word in words}
    for model in models:
        table = model.table(path)
        if table is None:
            continue
        places = {word: _row(table, word) for word in words}
        rows = {word: row for word, row in places.items() if row is not None}
        found = nearest(table, table.n, list(rows.values()), k)
        for (word, row), ids, cosines in zip(rows.items(), *map(Tensor.tolist, found)):
            facts: dict[str, Any] = {"row": row}
            if table.parts is not None:
                facts["codes"] = table.codes[row].tolist()
            facts["neighbours"] = [
                {"symbol": table.symbol(other), "row": other, "cosine": round(cosine, 4)}
                for other, cosine in zip(ids, cosines)
                if other >= 0
            ]
            out[word][model.name] = facts
    for own in out.values():
        if reference is not None and reference.name in own:
            _add_overlap(own, reference.name)
    return [{"word": word, "models": own} for word, own in out.items()]


def _add_overlap(models: dict[str, dict[str, Any]], reference: str) -> None:
    """The share of the reference's neighbours that each other model has too."""
    near = {name: {n["symbol"] for n in own["neighbours"]} for name, own in models.items()}
    wanted = len(models[reference]["neighbours"])
    for name, facts in models.items():
        if name != reference:
            facts["overlap"] = len(near[name] & near[reference]) / wanted if wanted else None


# Search in the page -------------------------------------------------------------------------------


def search_data(models: Sequence[Model], k: int = 10) -> dict[str, Any]:
    """Tables by path, each with the models that have it, and the symbols of all: codes in their
    bits and values, and neighbours only where they cannot be worked out from those."""
    shown = [(model, table) for model in models for table in model.tables if table.n]
    rows = min(LIMIT, max((table.n for _, table in shown), default=0))
    rows = min(rows, _affordable([table for _, table in shown], rows, k))
    vocabularies: dict[Any, dict[str, Any]] = {}  # models of the same data share one
    tables: dict[str, list[dict[str, Any]]] = {}
    for model, table in shown:
        key = table.n if table.symbols is None else tuple(table.symbols)
        listed = None if table.symbols is None else [printable(s) for s in table.symbols[:rows]]
        words = {"total": table.n, "rows": min(rows, table.n), "symbols": listed}
        vocabularies.setdefault(key, words)
        entry = _entry(table, min(rows, table.n), k)
        entry.update(name=model.name, vocabulary=list(vocabularies).index(key))
        tables.setdefault(table.path, []).append(entry)
    listed_tables = [{"path": path, "models": entries} for path, entries in tables.items()]
    return {"k": k, "tables": listed_tables, "vocabularies": list(vocabularies.values())}


def _affordable(tables: Sequence[TableView], rows: int, k: int) -> int:
    """Symbols that fit into the budget."""
    fixed = each = 0.0
    lists = {}
    for table in tables:
        parts = table.parts
        if parts is not None:
            each += row_bytes([code_bits(size) for size in parts.sizes]) * 4 / 3
        if parts is not None and _by_codes(parts):
            fixed += parts.values.numel() * 4 * 4 / 3
        else:
            fixed += _beforehand(table, rows) * k * 6 * 4 / 3
        if table.symbols is not None:
            lists[tuple(table.symbols[:1000]), table.n] = table.symbols[:rows]
    for symbols in lists.values():
        each += sum(len(s.encode("utf-8", "replace")) + 3 for s in symbols) / max(len(symbols), 1)
    return int(max(BUDGET - fixed, 0) / each) if each else rows


def _by_codes(parts: Parts) -> bool:
    """Whether the page can work the neighbours out from codes and values."""
    return parts.values.numel() * 4 <= _VALUES


def _beforehand(table: TableView, rows: int) -> int:
    """How many symbols get their neighbours beforehand."""
    rows = min(rows, table.n)
    pairs = min(_PAIRS, _MULTIPLICATIONS // max(table.d, 1))
    return min(rows, max(100, pairs // max(rows, 1)))


def _entry(table: TableView, rows: int, k: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"rows": rows, "padding": table.padding_idx}
    parts = table.parts
    if parts is not None:
        bits = [code_bits(size) for size in parts.sizes]
        packed = pack_codes(table.codes[:rows], bits)
        entry.update(codes=_base64(packed.numpy()), bits=bits, sizes=parts.sizes)
    if parts is not None and _by_codes(parts):
        values = parts.values.float().contiguous().numpy().astype("<f4")
        entry.update(values=_base64(values), width=values.shape[1], shared=parts.shared)
    else:
        some = _beforehand(table, rows)
        ids, cosines = nearest(table, rows, range(some), k)
        entry["neighbours"] = {
            "rows": some,
            "ids": _base64(ids.numpy().astype("<i4")),
            "cosines": _base64((cosines * 32767).round().numpy().astype("<i2")),
        }
    return entry


def _base64(array: numpy.ndarray) -> str:
    return base64.b64encode(numpy.ascontiguousarray(array).tobytes()).decode("ascii")
