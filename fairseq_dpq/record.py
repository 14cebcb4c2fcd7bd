"""The record of a model's DPQ tables that travels in its config, from training to compaction.

It is one JSON string under `dpq_tables`, beside the flat `dpq_*` options, so that every form of
fairseq config carries it unchanged.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fairseq_dpq.config import DPQConfig, DPQConfigError
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form
from fairseq_dpq.methods import METHODS
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
    written_by: str = f"fairseq-dpq {__version__}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TablesRecord:
        """Read a record; one of a newer version, or damaged, is an error that says so."""
        try:
            raw = json.loads(text)
            version = int(raw["version"])
            if version > VERSION:
                raise DPQConfigError(
                    f"the checkpoint's DPQ format is version {version}; this fairseq-dpq reads up "
                    f"to version {VERSION}: update it with pip install -U fairseq-dpq"
                )
            if version == 1:
                _from_version_1(raw)
            if raw["stage"] not in STAGES:
                raise ValueError(f"unknown stage {raw['stage']!r}")
            raw["tables"] = {path: Table(**table) for path, table in raw["tables"].items()}
            for table in raw["tables"].values():
                _check(table, raw["stage"])
            return cls(**raw)
        except DPQConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DPQConfigError(
                f"the checkpoint's {RECORD_KEY} record is damaged: {error}"
            ) from None


def _from_version_1(raw: dict[str, Any]) -> None:
    """Version 1 (0.1): `form` was the stage, and product codes the only form."""
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


def _check(table: Table, stage: str) -> None:
    """What a record claims, as far as it can be checked without the tensors."""
    unknown = sorted(set(table.options) - _KNOWN)
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}")
    if stage == "compact" and table.form.get("kind") not in FORMS:
        raise DPQConfigError(
            f"the checkpoint stores a table as {table.form.get('kind')!r}; this fairseq-dpq knows "
            f"{', '.join(FORMS)}: update it with pip install -U fairseq-dpq"
        )
