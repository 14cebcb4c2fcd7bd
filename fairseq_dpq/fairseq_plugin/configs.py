"""Reading and writing fairseq configs of all three types: Namespace, dict and DictConfig. This
module does not import fairseq, so that the tools can use it alone."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import Any, Callable, Iterator, Mapping

from fairseq_dpq.files.record import RECORD_KEY, TablesRecord


def get_option(cfg: Any, key: str) -> Any:
    """A key of a fairseq config of any type, None if it has none. A stranger's file may have
    anything in its place."""
    items = vars(cfg) if isinstance(cfg, Namespace) else cfg
    return items[key] if isinstance(items, Mapping) and key in items else None


def run_option(cfg: Any, section: str, key: str) -> Any:
    """An option of the whole run, given the model's config: older architectures have all options
    in one Namespace, the others a section of their own each."""
    own = get_option(cfg, key)
    if own is not None:
        return own
    parent = cfg._get_parent() if hasattr(cfg, "_get_parent") else None
    return get_option(get_option(parent, section), key)


def set_options(cfg: Any, values: dict[str, Any]) -> None:
    """Write keys into a fairseq config, even one that does not allow unknown keys."""
    with _open(cfg) as items:
        items.update(values)


def take_options(cfg: Any, keys: list[str]) -> dict[str, Any]:
    """Remove keys from a fairseq config; those that were there, with their values."""
    with _open(cfg) as items:
        return {key: items.pop(key) for key in keys if key in items}


def drop_options(cfg: Any, unwanted: Callable[[str], bool]) -> None:
    """Remove keys from a config of a file, without resolving what it interpolates; anything in its
    place stays."""
    if isinstance(cfg, (Namespace, Mapping)):
        with _open(cfg) as items:
            for key in [key for key in items if unwanted(str(key))]:
                del items[key]


@contextlib.contextmanager
def _open(cfg: Any) -> Iterator[Any]:
    """A config as a dictionary that can be written to."""
    if isinstance(cfg, (Namespace, dict)):
        yield vars(cfg) if isinstance(cfg, Namespace) else cfg
    else:
        from omegaconf import open_dict

        with open_dict(cfg):
            yield cfg


def model_config(state: Any) -> Any:
    """The config of a checkpoint's model; those of fairseq 0.9 and before have all in one."""
    cfg = state.get("cfg")
    return get_option(cfg, "model") if cfg else state.get("args")


def read_record(cfg: Any) -> TablesRecord | None:
    """The record in a model config, or None for a model without DPQ tables."""
    text = get_option(cfg, RECORD_KEY)
    return TablesRecord.from_json(text) if text else None


def write_record(cfg: Any, record: TablesRecord) -> None:
    """Write a record into a model config."""
    set_options(cfg, {RECORD_KEY: record.to_json()})
