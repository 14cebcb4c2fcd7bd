"""What the page's search needs, packed: symbols, codes in their bits, values; neighbours only where
they cannot be worked out from codes."""

from __future__ import annotations

import base64
from typing import Any, Sequence

import numpy

from fairseq_dpq.files.checkpoint import Progress
from fairseq_dpq.files.errors import printable
from fairseq_dpq.forms.base import Parts
from fairseq_dpq.forms.packing import code_bits, pack_codes, row_bytes
from fairseq_dpq.report.models import Model, TableView
from fairseq_dpq.report.neighbours import nearest, steps

LIMIT = 100_000  # symbols of a table that can be searched
BUDGET = 11_000_000  # characters of the page that all of it may take
_VALUES = 2_000_000  # bytes of values beyond which neighbours are worked out beforehand
_PAIRS = 50_000_000  # comparisons that are made beforehand: some seconds
_MULTIPLICATIONS = 20_000_000_000


def search_data(
    models: Sequence[Model], k: int = 10, progress: Progress | None = None
) -> dict[str, Any]:
    """Tables by path, each with the models that have it, and the symbols of all."""
    paths = list(dict.fromkeys(t.path for model in models for t in model.tables if t.n))
    shown = [(model, table) for model in models for table in model.tables if table.n]
    rows = min(LIMIT, max((table.n for _, table in shown), default=0))
    rows = min(rows, _affordable(shown, rows, k))
    vocabularies: list[dict[str, Any]] = []
    known: dict[Any, int] = {}
    tables = []
    for path in paths:
        entries = []
        for model, table in shown:
            if table.path == path:
                entry = _entry(table, min(rows, table.n), k, progress)
                entry.update(
                    name=model.name, vocabulary=_vocabulary(table, rows, vocabularies, known)
                )
                entries.append(entry)
        tables.append({"path": path, "models": entries})
    return {"k": k, "tables": tables, "vocabularies": vocabularies}


def _vocabulary(
    table: TableView, rows: int, vocabularies: list[dict[str, Any]], known: dict[Any, int]
) -> int:
    """The number of the table's list of symbols; models of the same data share one."""
    key = table.n if table.symbols is None else tuple(table.symbols)
    if key not in known:
        known[key] = len(vocabularies)
        listed = None if table.symbols is None else [printable(s) for s in table.symbols[:rows]]
        entry = {"total": table.n, "rows": min(rows, table.n), "symbols": listed}
        vocabularies.append(entry)
    return known[key]


def _affordable(shown: Sequence[tuple[Model, TableView]], rows: int, k: int) -> int:
    """Symbols that fit into the budget."""
    fixed = each = 0.0
    lists = {}
    for _, table in shown:
        parts = table.parts
        if parts is not None:
            each += row_bytes([code_bits(size) for size in parts.sizes]) * 4 / 3
        if parts is not None and _by_codes(parts):
            fixed += parts.values.numel() * 4 * 4 / 3
        else:
            some = _beforehand(table, rows)
            fixed += some * k * 6 * 4 / 3
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


def _entry(table: TableView, rows: int, k: int, progress: Progress | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"rows": rows, "padding": table.padding_idx}
    parts = table.parts
    if parts is not None:
        bits = [code_bits(size) for size in parts.sizes]
        packed = pack_codes(table.codes()[:rows], bits)
        entry.update(codes=_base64(packed.numpy()), bits=bits, sizes=parts.sizes)
    if parts is not None and _by_codes(parts):
        values = parts.values.float().contiguous().numpy().astype("<f4")
        entry.update(values=_base64(values), width=values.shape[1], shared=parts.shared)
    else:
        some = _beforehand(table, rows)
        total = steps(rows, some)
        report = progress(f"neighbours of {table.path}", total) if progress is not None else None
        found = nearest(table.rows, rows, list(range(some)), k, table.padding_idx, report)
        cosines = numpy.where(found.ids < 0, 0, found.cosines)
        entry["neighbours"] = {
            "rows": some,
            "ids": _base64(found.ids.astype("<i4")),
            "cosines": _base64(numpy.round(cosines * 32767).astype("<i2")),
        }
    return entry


def _base64(array: numpy.ndarray) -> str:
    return base64.b64encode(numpy.ascontiguousarray(array).tobytes()).decode("ascii")
