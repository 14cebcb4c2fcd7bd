"""Files of every kind as the report takes them: training, compact, full, and exported tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.files.checkpoint import (
    Checkpoint,
    Progress,
    keys_of,
    stored_bytes,
    stored_form,
    training_layer,
)
from fairseq_dpq.files.data import find_dictionary, read_dictionary
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.reader import is_safetensors, read_tensors
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.files.tables import left_alone, table_facts, token_tables
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form, Parts
from fairseq_dpq.layer import DPQEmbedding


def silent(what: str, total: int) -> Callable[[int], None]:
    """Progress that nobody sees."""
    return lambda done: None


@dataclass
class TableView:
    """One table of a model, in whatever form."""

    path: str
    n: int
    d: int
    padding_idx: int | None
    rows: Callable[[Tensor], Tensor]  # ids -> their vectors
    sizes: dict[str, Any]  # bytes and ratios
    form: Form | None = None  # None for a full table
    options: dict[str, Any] = field(default_factory=dict)  # of a trained table
    layer: DPQEmbedding | None = None  # of a training checkpoint
    symbols: list[str] | None = None

    @property
    def parts(self) -> Parts | None:
        """What rows are put together from, if their codes stand for parts side by side."""
        return None if self.form is None else self.form.parts()

    @cached_property
    def codes(self) -> Tensor:
        """The codes (n, D) of a table that has parts."""
        assert self.form is not None
        codes = self.form.unpacked_codes()
        assert codes is not None
        return codes

    def symbol(self, row: int) -> str:
        """The symbol of a row, or its number."""
        return self.symbols[row] if self.symbols is not None else f"#{row}"

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Rows by symbol; of a symbol that is there twice, the first."""
        symbols = list(enumerate(self.symbols or []))
        return {symbol: row for row, symbol in reversed(symbols)}


@dataclass
class Model:
    """One file of the command line, or a training checkpoint with its compact file."""

    name: str
    path: Path
    kind: str  # training, compact, full, exported
    tables: list[TableView]
    sizes: dict[str, Any]
    updates: int | None = None
    source: str | None = None  # of a compact file: the training checkpoint's name
    notes: list[str] = field(default_factory=list)

    def table(self, path: str) -> TableView | None:
        return next((table for table in self.tables if table.path == path), None)


def load_model(
    path: Path,
    name: str,
    dictionaries: dict[str, Path],
    trust: bool = False,
    progress: Progress = silent,
) -> Model:
    """Read a file of any kind. `dictionaries` are by table; the key "" is for all others."""
    if is_safetensors(path):
        model = _exported(path, name)
    else:
        checkpoint = Checkpoint.load(path, trust)
        record = checkpoint.record()
        sizes: dict[str, Any] = {
            "file_bytes": checkpoint.file_bytes,
            "optimizer_bytes": stored_bytes(checkpoint.state.get("last_optimizer_state")),
            "model_bytes": stored_bytes(checkpoint.weights),
        }
        model = Model(name, path, "full", [], sizes, _updates(checkpoint))
        if record is None:
            model.tables = _full_tables(checkpoint)
        else:
            model.kind, model.source = record.stage, record.source
            model.tables = [
                _dpq_table(checkpoint, record, table_path, progress) for table_path in record.tables
            ]
            model.sizes["left_alone"] = left_alone(checkpoint, record)
        _add_symbols(model, checkpoint, dictionaries)
    whole_model(model)
    return model


def _coded(path: str, table: Table, form: Form, stored: int) -> TableView:
    """A table that is, or would be, stored as `form`; `stored` bytes is what it takes now."""
    facts = table_facts(path, table, form)
    names = ("full_bytes", "compact_bytes", "formula_cr", "measured_cr", "bits_per_symbol")
    sizes = {**{name: facts[name] for name in (*names, "description")}, "stored_bytes": stored}
    n, d = table.num_embeddings, table.embedding_dim
    return TableView(path, n, d, form.padding_idx, form, sizes, form, table.options)


def _exported(path: Path, name: str) -> Model:
    opened = read_tensors(path)
    form, symbols = opened.form(FORMS), opened.symbols()
    own = Table(form.num_embeddings, form.embedding_dim, form.padding_idx, {})
    table = _coded(opened.name, own, form, form.saved_nbytes)
    table.symbols = symbols
    sizes = {"file_bytes": path.stat().st_size, "optimizer_bytes": 0}
    sizes["model_bytes"] = form.saved_nbytes
    return Model(name, path, "exported", [table], sizes)


def _updates(checkpoint: Checkpoint) -> int | None:
    history = checkpoint.state.get("optimizer_history")
    last = history[-1] if isinstance(history, list) and history else None
    number = get_option(last, "num_updates") if isinstance(last, dict) else None
    return number if isinstance(number, int) else None


def _dpq_table(
    checkpoint: Checkpoint, record: TablesRecord, path: str, progress: Progress
) -> TableView:
    table = record.tables[path]
    layer = None
    if record.stage == "compact":
        form = stored_form(checkpoint, path, table)
    else:
        layer = training_layer(checkpoint, path, table)
        form = layer.compact(packed=True, progress=progress(path, table.num_embeddings))
    mine = keys_of(checkpoint.weights, [path])
    stored = stored_bytes([checkpoint.weights[key] for key in mine])
    return replace(_coded(path, table, form, stored), layer=layer)


def _full_tables(checkpoint: Checkpoint) -> list[TableView]:
    out = []
    for found in token_tables(checkpoint.weights, checkpoint.model_cfg):
        weight = checkpoint.weights[f"{found.path}.weight"].detach()
        n, d = weight.shape
        total = weight.numel() * weight.element_size()
        sizes = {"full_bytes": 4 * n * d, "stored_bytes": total, "description": "full table"}
        pad = get_option(checkpoint.model_cfg, "pad")
        padding_idx = pad if isinstance(pad, int) and 0 <= pad < n else 1 if n > 1 else None

        def rows(ids: Tensor, weight: Tensor = weight) -> Tensor:
            return weight[ids].float()

        out.append(TableView(found.path, n, d, padding_idx, rows, sizes))
    return out


def _add_symbols(model: Model, checkpoint: Checkpoint, dictionaries: dict[str, Path]) -> None:
    for table in model.tables:
        named = dictionaries.get(table.path)
        if named is not None:
            table.symbols = read_dictionary(named, table.path, table.n)
            continue
        problems = []
        for file in (dictionaries.get(""), None):
            try:
                found = file or find_dictionary(checkpoint, table.path)
                table.symbols = read_dictionary(found, table.path, table.n)
                break
            except CheckpointError as error:
                problems.append(str(error).replace(", or --no-symbols", ""))
        else:
            model.notes.append(problems[0 if dictionaries else -1])


def whole_model(model: Model) -> None:
    """Totals over the tables, and what the model would take with compact ones."""
    sizes = model.sizes
    sizes["embedding_bytes"] = sum(table.sizes["stored_bytes"] for table in model.tables)
    sizes["full_embedding_bytes"] = sum(table.sizes["full_bytes"] for table in model.tables)
    compact = [table.sizes.get("compact_bytes") for table in model.tables]
    if compact and None not in compact:
        total = sum(size for size in compact if size is not None)
        sizes["compact_embedding_bytes"] = total
        sizes["compact_model_bytes"] = sizes["model_bytes"] - sizes["embedding_bytes"] + total


def join_compact(models: list[Model]) -> list[Model]:
    """A training checkpoint and the compact file that was made of it are one model."""
    out: list[Model] = []
    for model in models:
        origin = next((other for other in out if _made_of(model, other)), None)
        if origin is None:
            out.append(model)
        else:
            origin.sizes["compact_file_bytes"] = model.sizes["file_bytes"]
            origin.sizes["compact_file"] = str(model.path)
    return out


def _made_of(compact: Model, other: Model) -> bool:
    if (compact.kind, other.kind) != ("compact", "training") or not compact.source:
        return False
    if Path(compact.source).name != other.path.name or len(compact.tables) != len(other.tables):
        return False
    for ours in compact.tables:
        theirs = other.table(ours.path)
        if theirs is None or ours.parts is None or theirs.parts is None:
            return False
        if ours.parts.sizes != theirs.parts.sizes or not torch.equal(ours.codes, theirs.codes):
            return False
    return True


def short_names(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.absolute().with_suffix("").parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names if paths else []
