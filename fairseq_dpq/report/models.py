"""Files of every kind as inspect and report take them: training, compact, full, and exported."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.files.checkpoint import Checkpoint, stored_bytes
from fairseq_dpq.files.data import symbols_of
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.reader import is_safetensors, read_tensors
from fairseq_dpq.files.record import Table
from fairseq_dpq.files.tables import table_facts, token_tables
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form, Parts
from fairseq_dpq.model import EmbeddingTable


@dataclass
class TableView:
    """One table of a model, in whatever form."""

    path: str
    n: int
    d: int
    padding_idx: int | None
    rows: Callable[[Tensor], Tensor]  # ids -> their vectors
    facts: dict[str, Any]  # names, bytes and ratios
    form: Form | None = None  # None for a full table
    options: dict[str, Any] = field(default_factory=dict)  # of a trained table
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
    bytes: dict[str, Any]  # of the file and its parts
    checkpoint: Checkpoint | None = None  # None of an exported table
    notes: list[str] = field(default_factory=list)

    def table(self, path: str) -> TableView | None:
        return next((table for table in self.tables if table.path == path), None)

    @property
    def sizes(self) -> dict[str, Any]:
        """Its bytes, those of its tables, and what it would take with compact ones."""

        def total(name: str) -> int:
            return sum(table.facts[name] for table in self.tables)

        stored, full = total("stored_bytes"), total("full_bytes")
        sizes = {**self.bytes, "embedding_bytes": stored, "full_embedding_bytes": full}
        if self.tables and all("compact_bytes" in table.facts for table in self.tables):
            small = total("compact_bytes")
            sizes["compact_embedding_bytes"] = small
            sizes["compact_model_bytes"] = sizes["model_bytes"] - stored + small
        return sizes

    @property
    def updates(self) -> int | None:
        """The updates of its training, where it says so."""
        history = self.checkpoint.state.get("optimizer_history") if self.checkpoint else None
        number = get_option(history[-1], "num_updates") if history else None
        return number if isinstance(number, int) else None


def load_model(
    path: Path, name: str = "", dictionaries: Mapping[str, Path] | None = None, trust: bool = False
) -> Model:
    """Read a file of any kind. `dictionaries` are by table; the key "" is for all others. With none
    at all, symbols are not looked for."""
    if is_safetensors(path):
        opened = read_tensors(path)
        form = opened.form(FORMS)
        own = Table(form.num_embeddings, form.embedding_dim, form.padding_idx, {})
        table = _coded(opened.name, own, form, form.saved_nbytes)
        table.symbols = opened.symbols()
        sizes = {"file_bytes": path.stat().st_size, "optimizer_bytes": 0}
        return Model(name, path, "exported", [table], {**sizes, "model_bytes": form.saved_nbytes})
    checkpoint = Checkpoint.load(path, trust)
    record = checkpoint.record
    if record is None:
        found = token_tables(checkpoint.weights, checkpoint.model_cfg)
        tables = [_full(checkpoint, table) for table in found]
    else:
        tables = [
            _coded(at, table, checkpoint.form(at), checkpoint.table_bytes(at))
            for at, table in record.tables.items()
        ]
    sizes = {"file_bytes": checkpoint.file_bytes, "optimizer_bytes": checkpoint.optimizer_bytes()}
    sizes["model_bytes"] = stored_bytes(checkpoint.weights)
    model = Model(name, path, record.stage if record else "full", tables, sizes, checkpoint)
    for table in tables if dictionaries is not None else ():
        _add_symbols(model, checkpoint, table, dictionaries or {})
    return model


def _coded(path: str, table: Table, form: Form, stored: int) -> TableView:
    """A table that is, or would be, stored as `form`; `stored` bytes is what it takes now."""
    facts = {**table_facts(path, table, form), "stored_bytes": stored}
    n, d = table.num_embeddings, table.embedding_dim
    return TableView(path, n, d, form.padding_idx, form, facts, form, table.options)


def _full(checkpoint: Checkpoint, found: EmbeddingTable) -> TableView:
    weight = checkpoint.weights[f"{found.path}.weight"].detach()
    n, d = weight.shape
    facts: dict[str, Any] = {"path": found.path, "aliases": found.paths[1:]}
    facts.update(num_embeddings=n, embedding_dim=d, description="full table")
    facts.update(full_bytes=4 * n * d, stored_bytes=weight.numel() * weight.element_size())
    pad = get_option(checkpoint.model_cfg, "pad")
    padding_idx = pad if isinstance(pad, int) and 0 <= pad < n else 1 if n > 1 else None
    return TableView(found.path, n, d, padding_idx, lambda ids: weight[ids].float(), facts)


def _add_symbols(
    model: Model, checkpoint: Checkpoint, table: TableView, dictionaries: Mapping[str, Path]
) -> None:
    """Of the table's own dictionary, of that for all, or of the data that it was trained with."""
    own = dictionaries.get(table.path)
    problems = []
    for file in [own] if own else [dictionaries.get(""), None]:
        try:
            table.symbols = symbols_of(checkpoint, table.path, table.n, file)
            return
        except CheckpointError as error:
            if own:
                raise
            problems.append(str(error).replace(", or --no-symbols", ""))
    model.notes.append(problems[0 if dictionaries else -1])


def join_compact(models: list[Model]) -> list[Model]:
    """A training checkpoint and the compact file that was made of it are one model."""
    out: list[Model] = []
    for model in models:
        origin = next((other for other in out if _made_of(model, other)), None)
        if origin is None:
            out.append(model)
        else:
            compact = {"compact_file_bytes": model.bytes["file_bytes"]}
            origin.bytes.update(compact, compact_file=str(model.path))
    return out


def _made_of(compact: Model, other: Model) -> bool:
    if (compact.kind, other.kind) != ("compact", "training") or compact.checkpoint is None:
        return False
    source = compact.checkpoint.dpq_record().source
    if Path(source or "").name != other.path.name or len(compact.tables) != len(other.tables):
        return False
    for ours in compact.tables:
        theirs = other.table(ours.path)
        if theirs is None or ours.parts is None or theirs.parts is None:
            return False
        if ours.parts.sizes != theirs.parts.sizes or not torch.equal(ours.codes, theirs.codes):
            return False
    return True
