"""The record of a model's DPQ tables that travels in its config, from training to compaction.

It is one JSON string under `dpq_tables`, beside the flat `dpq_*` options, so that every form of
fairseq config (Namespace, dict, DictConfig) carries it unchanged. No fairseq import here.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from typing import Any

from fairseq_dpq.config import DPQConfig, DPQConfigError

RECORD_KEY = "dpq_tables"
VERSION = 1
FORMS = ("training", "compact")


@dataclass
class Table:
    """One DPQ table: its shape, its options, and where else the model uses it."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    options: dict[str, Any]  # the fields of DPQConfig
    aliases: list[str] = field(default_factory=list)  # other paths of the same module
    tied: list[str] = field(default_factory=list)  # output layers that multiply by this table

    @property
    def config(self) -> DPQConfig:
        return DPQConfig(**self.options)


@dataclass
class TablesRecord:
    """All DPQ tables of a model, by module path, and the form they are in."""

    tables: dict[str, Table]
    form: str = "training"
    source: str | None = None  # of a compact form: the training checkpoint's file name
    version: int = VERSION

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
            if raw["form"] not in FORMS:
                raise ValueError(f"unknown form {raw['form']!r}")
            raw["tables"] = {path: Table(**table) for path, table in raw["tables"].items()}
            return cls(**raw)
        except DPQConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DPQConfigError(
                f"the checkpoint's {RECORD_KEY} record is damaged: {error}"
            ) from None


def get_option(cfg: Any, key: str, default: Any = None) -> Any:
    """A key of a fairseq config, whichever of its three forms it has."""
    if cfg is None:
        return default
    if isinstance(cfg, Namespace):
        return getattr(cfg, key, default)
    return cfg[key] if key in cfg else default  # noqa: SIM401, DictConfig.get is no dict.get


def set_options(cfg: Any, values: dict[str, Any]) -> None:
    """Write keys into a fairseq config, also into one that is closed to unknown keys."""
    if isinstance(cfg, Namespace):
        for key, value in values.items():
            setattr(cfg, key, value)
    elif isinstance(cfg, dict):
        cfg.update(values)
    else:
        from omegaconf import open_dict

        with open_dict(cfg):
            for key, value in values.items():
                cfg[key] = value


def delete_options(cfg: Any, keys: list[str]) -> None:
    """Take keys out of a fairseq config, where they are present."""
    for key in keys:
        if isinstance(cfg, Namespace):
            if hasattr(cfg, key):
                delattr(cfg, key)
        elif isinstance(cfg, dict):
            cfg.pop(key, None)
        elif key in cfg:
            from omegaconf import open_dict

            with open_dict(cfg):
                del cfg[key]


def read_record(cfg: Any) -> TablesRecord | None:
    """The record in a model config, or None for a model without DPQ tables."""
    text = get_option(cfg, RECORD_KEY)
    return TablesRecord.from_json(text) if text else None


def write_record(cfg: Any, record: TablesRecord) -> None:
    """Put a record into a model config."""
    set_options(cfg, {RECORD_KEY: record.to_json()})
