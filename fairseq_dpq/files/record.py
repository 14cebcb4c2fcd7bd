"""The record of a model's DPQ tables that travels in its config, from training to compaction.

It is one JSON string under `dpq_tables`, beside the flat `dpq_*` options, so that every form of
fairseq config carries it unchanged.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Collection, Mapping

from torch import Tensor

from fairseq_dpq.config import DPQConfigError, flag, option_type
from fairseq_dpq.files.errors import naming
from fairseq_dpq.files.memory import text_crc32
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.fitting import (
    build_form,
    check_settings,
    check_size,
    check_type,
    check_version,
    shown,
)
from fairseq_dpq.methods import METHODS, MethodOptions, make_options
from fairseq_dpq.version import __version__

logger = logging.getLogger("fairseq_dpq")

RECORD_KEY = "dpq_tables"
EXACT_KEY = "dpq_exact_logits"  # beside it: whether tied outputs multiply by the dense table
VERSION = 3
STAGES = ("training", "compact")
_REMOVED = {"rotation_trick"}  # options of methods until 1.0.0


@dataclass
class Table:
    """One DPQ table: its shape, its options, and where else the model uses it."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    options: dict[str, Any]  # the method and its options; empty for a table never trained
    aliases: list[str] = field(default_factory=list)  # other paths of the same module
    tied: list[str] = field(default_factory=list)  # output layers that multiply by this table
    form: dict[str, Any] = field(default_factory=dict)  # kind and settings, once compact
    checksums: dict[str, int] = field(default_factory=dict)  # CRC-32 of its tensors, once compact

    @property
    def config(self) -> MethodOptions:
        given = dict(self.options)
        return make_options(given.pop("method"), given)

    @property
    def size(self) -> tuple[int, int, int | None]:
        return self.num_embeddings, self.embedding_dim, self.padding_idx

    def form_class(self) -> tuple[type[Form], dict[str, Any]]:
        """The class of the table's form, and its settings."""
        settings = dict(self.form)
        return FORMS[settings.pop("kind")], settings

    def build_form(self, tensors: Mapping[str, Tensor]) -> Form:
        """The table's form of these tensors; ValueError for what they cannot be."""
        cls, settings = self.form_class()
        return build_form(cls, self.size, settings, tensors)


@dataclass
class TablesRecord:
    """All DPQ tables of a model, by module path, and the stage they are in."""

    tables: dict[str, Table]
    stage: str = "training"
    source: str | None = None  # of a compact stage: the training checkpoint's file name
    version: int = VERSION
    written_by: str = f"fairseq-dpq {__version__}"

    def names(self) -> dict[str, str]:
        """All module paths of the tables, with the first path of the table that each names."""
        tables = self.tables.items()
        return {name: path for path, table in tables for name in (path, *table.aliases)}

    def to_json(self) -> str:
        return sealed(asdict(self))

    @classmethod
    def from_json(cls, text: Any) -> TablesRecord:
        """Read a record; one of another version, or damaged, is an error that says so."""
        with naming(f"the checkpoint's {RECORD_KEY} record", DPQConfigError):
            check_type(RECORD_KEY, text, str)
            raw = json.loads(text)
            check_type("the record", raw, dict)
            check_type("version", raw["version"], int)
            check_version(raw["version"], VERSION, raw.get("written_by"))
            if raw.pop("crc32") != _crc32(raw):
                raise ValueError("its text does not match its checksum: the file is damaged")
            return cls._from_dict(raw)

    @classmethod
    def _from_dict(cls, raw: dict[str, Any]) -> TablesRecord:
        if raw["stage"] not in STAGES:
            raise ValueError(f"unknown stage {shown(raw['stage'])}")
        check_type("tables", raw["tables"], dict)
        for name in ("source", "written_by"):
            if raw.get(name) is not None:
                check_type(name, raw[name], str)
        _check_names("the record", raw, cls)
        tables = {}
        for path, table in raw["tables"].items():
            check_type(path, table, dict)
            _check_names(path, table, Table)
            tables[path] = Table(**table)
            _check(tables[path], raw["stage"])
        return cls(**{**raw, "tables": tables})


def sealed(raw: dict[str, Any]) -> str:
    """The text of a record, with its checksum."""
    return json.dumps({**raw, "crc32": _crc32(raw)}, sort_keys=True)


def _crc32(raw: dict[str, Any]) -> int:
    """The checksum of a record without it."""
    return text_crc32(json.dumps(raw, sort_keys=True))


def _check_names(what: str, raw: Collection[str], cls: Any) -> None:
    """Raise ValueError for unknown names, and for missing fields that have no default."""
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    for name in sorted({*raw} - {f.name for f in fields(cls)}):
        raise ValueError(f"{what} has the unknown entry {shown(name)}; try a newer fairseq-dpq")
    for name in sorted(needed - {*raw}):
        raise ValueError(f"{what} has no {name}")


def _check(table: Table, stage: str) -> None:
    """What a record claims, as far as it can be checked without the tensors."""
    check_size(table.num_embeddings, table.embedding_dim, table.padding_idx)
    for name in ("options", "form", "checksums"):
        check_type(name, getattr(table, name), dict)
    for name in ("aliases", "tied"):
        check_type(name, getattr(table, name), list)
        for other in getattr(table, name):
            check_type(name, other, str)
    for name, crc in table.checksums.items():
        check_type(f"the checksum of {name}", crc, int)
    _check_options(table.options, stage)
    if stage == "compact":
        settings = dict(table.form)
        kind = _known("stores a table as", settings.pop("kind"), FORMS)
        check_settings(FORMS[kind], settings)


def _known(what: str, name: Any, known: Mapping[str, Any]) -> str:
    """The name of a method or form that is installed; anything else is an error."""
    if not isinstance(name, str) or name not in known:
        raise DPQConfigError(
            f"the checkpoint {what} {shown(name)}; this fairseq-dpq knows {', '.join(known)}: "
            "update fairseq-dpq, or install the package that adds it"
        )
    return name


@functools.lru_cache
def _say_gone(name: str) -> None:
    """Once in a process."""
    logger.warning(f"{flag(name)} of version 1.0.0 is gone: a resumed training goes on without it")


def _check_options(options: dict[str, Any], stage: str) -> None:
    """Each option of its type; their values are checked with the tensors. One that the version
    which wrote the file did not know gets its default, which has to mean what was done before;
    one that is gone is left out."""
    if not options:
        return
    name = _known("was trained by method", options.get("method"), METHODS)
    known = {f.name: f for f in fields(METHODS[name].options)}
    for key in {*options} & _REMOVED:
        if options.pop(key) is not False and stage == "training":
            _say_gone(key)
    _check_names("options", {*options} - {"method"}, METHODS[name].options)
    for key, f in known.items():
        if f.default is not None:  # where it is, the method chooses, perhaps not as it did then
            options.setdefault(key, f.default)
        value, kind = options[key], option_type(f)
        if value is None and f.default is None:
            continue
        check_type(key, float(value) if kind is float and type(value) is int else value, kind)
        if kind is float and not math.isfinite(value):
            raise ValueError(f"{key}: expected a finite number, found {value}")
    needed = [key for key in ("K", "D") if key in known and options[key] is None]
    if needed:
        raise ValueError(f"{needed[0]}: expected int, found None")
