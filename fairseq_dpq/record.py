"""The record of a model's DPQ tables that travels in its config, from training to compaction.

It is one JSON string under `dpq_tables`, beside the flat `dpq_*` options, so that every form of
fairseq config carries it unchanged.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from fairseq_dpq.checksums import text_crc32
from fairseq_dpq.config import DPQConfig, DPQConfigError, flag_type
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.fitting import check_settings, check_size, check_type, shown
from fairseq_dpq.methods import METHODS
from fairseq_dpq.printable import printable
from fairseq_dpq.version import __version__

RECORD_KEY = "dpq_tables"
VERSION = 2
STAGES = ("training", "compact")
_KNOWN = {f.name for f in fields(DPQConfig)}
_KIND = "product_codes"  # the only kind of version 1


@dataclass
class Table:
    """One DPQ table: its shape, its options, and where else the model uses it."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    options: dict[str, Any]  # the fields of DPQConfig; empty for a table that was never trained
    aliases: list[str] = field(default_factory=list)  # other paths of the same module
    tied: list[str] = field(default_factory=list)  # output layers that multiply by this table
    form: dict[str, Any] = field(default_factory=dict)  # kind and settings, once compact
    # CRC-32 of each tensor, once compact; packed ones have theirs beside them in the state_dict
    checksums: dict[str, int] = field(default_factory=dict)

    @property
    def config(self) -> DPQConfig:
        return DPQConfig(**self.options)

    def empty_form(self, **more: Any) -> Form:
        """A module of the table's form, to be loaded."""
        settings = dict(self.form)
        cls = FORMS[settings.pop("kind")]
        return cls(self.num_embeddings, self.embedding_dim, self.padding_idx, **settings, **more)


@dataclass
class TablesRecord:
    """All DPQ tables of a model, by module path, and the stage they are in."""

    tables: dict[str, Table]
    stage: str = "training"
    source: str | None = None  # of a compact stage: the training checkpoint's file name
    version: int = VERSION
    origin: int = VERSION  # of the checkpoint that the training began with
    written_by: str = f"fairseq-dpq {__version__}"

    def to_json(self) -> str:
        raw = asdict(self)
        if self.origin == VERSION:  # files stay readable to earlier releases
            del raw["origin"]
        return sealed(raw)

    @classmethod
    def from_json(cls, text: Any) -> TablesRecord:
        """Read a record; one of a newer version, or damaged, is an error that says so."""
        try:
            check_type(RECORD_KEY, text, str)
            raw = json.loads(text)
            check_type("the record", raw, dict)
            check_type("version", raw["version"], int)
            version = raw["version"]
            if version > VERSION:
                raise DPQConfigError(
                    f"the checkpoint's DPQ format is version {version}; this fairseq-dpq reads up "
                    f"to version {VERSION}: update it with pip install -U fairseq-dpq"
                )
            if version < 1:
                raise ValueError(f"there is no version {version}")
            if version == 1:
                _from_version_1(raw)
            elif raw.pop("crc32") != _crc32(raw):
                raise ValueError("its text does not match its checksum")
            return cls._from_dict(raw)
        except DPQConfigError:
            raise
        except KeyError as error:
            problem = f"{error} is missing"
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            problem = str(error)
        except RecursionError:
            problem = "it is nested too deeply"
        text = printable(f"the checkpoint's {RECORD_KEY} record is damaged: {problem}")
        raise DPQConfigError(text)

    @classmethod
    def _from_dict(cls, raw: dict[str, Any]) -> TablesRecord:
        if raw["stage"] not in STAGES:
            raise ValueError(f"unknown stage {shown(raw['stage'])}")
        check_type("tables", raw["tables"], dict)
        check_type("origin", raw.get("origin", VERSION), int)
        for name in ("source", "written_by"):
            if raw.get(name) is not None:
                check_type(name, raw[name], str)
        _check_names("the record", raw, cls)
        tables = {}
        for path, table in raw["tables"].items():
            check_type(path, table, dict)
            _drop_old_default(table.get("options"))
            _check_names(path, table, Table)
            tables[path] = Table(**table)
            _check(tables[path], raw["stage"])
            _forget_unused_D(tables[path].options)
        return cls(**{**raw, "tables": tables})


def sealed(raw: dict[str, Any]) -> str:
    """The text of a record, with its checksum."""
    return json.dumps({**raw, "crc32": _crc32(raw)}, sort_keys=True)


def _crc32(raw: dict[str, Any]) -> int:
    """The checksum of a record without it."""
    return text_crc32(json.dumps(raw, sort_keys=True))


def _from_version_1(raw: dict[str, Any]) -> None:
    """Version 1 (0.1): `form` was the stage, and product codes the only form."""
    raw["origin"] = 1
    raw["stage"] = raw.pop("form")
    raw["written_by"] = "fairseq-dpq 0.1"
    for table in raw["tables"].values():
        options = table["options"]
        if raw["stage"] == "compact":
            names = ("K", "D", "share_subspaces")
            table["form"] = {"kind": _KIND, **{k: options[k] for k in names}}
        # How 0.1 trained: batch statistics, no warm-up, weights by the mean over dimensions.
        options.update(warmup_updates=0, ramp_updates=0, batch_stats=options["normalize"])
        for name in ("reg_weight", "commitment"):
            options[name] = options[name] / table["embedding_dim"]
        own = ("method", *METHODS[options["method"]].options, "sparse")
        table["options"] = {
            name: value for name, value in options.items() if name in own or name not in _KNOWN
        }


def _drop_old_default(options: Any) -> None:
    """Records once named the weight of the vq regulariser, at its default, with any method."""
    if isinstance(options, dict) and options.get("reg_weight") == 1.0:
        method = METHODS.get(str(options.get("method")))
        if method is not None and "reg_weight" not in method.options:
            del options["reg_weight"]


def _check_names(what: str, raw: dict[str, Any], cls: Any) -> None:
    """Raise ValueError for entries that the class does not have, and for those that are missing."""
    names = {f.name for f in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    for name in sorted(set(raw) - names):
        raise ValueError(f"{what} has the unknown entry {shown(name)}")
    for name in sorted(needed - set(raw)):
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
    _check_options(table.options)
    if stage == "compact":
        settings = dict(table.form)
        kind = settings.pop("kind")
        if not isinstance(kind, str) or kind not in FORMS:
            raise DPQConfigError(
                f"the checkpoint stores a table as {shown(kind)}; this fairseq-dpq knows "
                f"{', '.join(FORMS)}: update it with pip install -U fairseq-dpq"
            )
        check_settings(FORMS[kind], settings)


def _forget_unused_D(options: dict[str, Any]) -> None:
    """Early files of version 2 have a D for methods without codes too, where none is allowed."""
    method = METHODS.get(options.get("method", DPQConfig.method))
    if method is not None and not method.has_codes:
        options.pop("D", None)


def _check_options(options: dict[str, Any]) -> None:
    known = {f.name: f for f in fields(DPQConfig)}
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"unknown option {shown(name)}")
        kind = flag_type(known[name])
        if value is None and "None" in str(known[name].type):
            continue
        check_type(name, float(value) if kind is float and type(value) is int else value, kind)
        if kind is float and not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, found {value}")
    method = METHODS.get(options.get("method", DPQConfig.method))
    if options and method is not None and method.has_codes and options.get("D") is None:
        raise ValueError("D: expected int, found None")
