"""What the page's search needs, packed: symbols, codes in their bits, values; neighbours only where
they cannot be worked out from codes."""

from __future__ import annotations

import base64
from typing import Any, Sequence

import numpy

from fairseq_dpq.files.errors import printable
from fairseq_dpq.forms.base import Parts
from fairseq_dpq.forms.packing import code_bits, pack_codes, row_bytes
from fairseq_dpq.report.models import Model, TableView
from fairseq_dpq.report.words import nearest

LIMIT = 100_000  # symbols of a table that can be searched
BUDGET = 11_000_000  # characters of the page that all of it may take
_VALUES = 2_000_000  # bytes of values beyond which neighbours are worked out beforehand
_PAIRS = 50_000_000  # comparisons that are made beforehand: some seconds
_MULTIPLICATIONS = 20_000_000_000


def search_data(models: Sequence[Model], k: int = 10) -> dict[str, Any]:
    """Tables by path, each with the models that have it, and the symbols of all."""
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
