"""Validation of untrusted checkpoints: what a record claims is compared with the tensors that are
there, before anything is built by it. The tools and fairseq's own loading use it."""

from __future__ import annotations

from typing import Any, Collection, Mapping

import torch
from torch import Tensor

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.configs import model_config, read_record
from fairseq_dpq.files.errors import printable
from fairseq_dpq.files.memory import check_crc32
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Layout
from fairseq_dpq.forms.fitting import check_form, check_tensor, is_plain

_NAME = "embed_tokens"  # of every token table in fairseq
_MOST_CODES = 1 << 24  # codes of all groups that one row is compared with

Weights = Mapping[str, Tensor]


def check_record(record: TablesRecord, weights: Weights) -> None:
    """Raise DPQConfigError unless the record describes the tensors of a state_dict."""
    names = {name for path, table in record.tables.items() for name in (path, *table.aliases)}
    by_module = _by_module(weights, names)
    taken: dict[str, str] = {}  # module path: the table that it belongs to
    for path, table in record.tables.items():
        for name in (path, *table.aliases):
            if name in taken:
                raise _error(name, f"is named twice, by {taken[name]} and by {path}")
            taken[name] = path
            for key, tensor in by_module.get(name, {}).items():
                if not is_plain(tensor):
                    raise _error(f"{name}.{key}", "is not a plain tensor")
    for path, table in record.tables.items():
        try:
            own = by_module.get(path, {})
            if record.stage == "compact":
                _check_stored(table, own)
            else:
                _check_training(table, own)
            _check_names(path, table, by_module, weights)
        except DPQConfigError:
            raise
        except ValueError as error:
            raise _error(path, str(error)) from error
    _check_complete(taken, by_module)


def check_state(state: Any, name: str) -> None:
    """The same for a state that fairseq has loaded; one without DPQ tables is not looked at."""
    record, weights = read_record(model_config(state)), state.get("model")
    if record is None:
        return
    if not isinstance(weights, Mapping):
        raise DPQConfigError(f"{printable(name)} has a record of DPQ tables, but no model")
    try:
        check_record(record, weights)
    except DPQConfigError as error:
        raise DPQConfigError(f"{printable(name)}: {error}") from error


def _error(path: str, text: str) -> DPQConfigError:
    return DPQConfigError(printable(f"{path}: {text}"))


def _by_module(weights: Weights, tables: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """Tensors by module. A table has all that is below its path: a form can be made of forms."""
    out: dict[str, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        module = owner = str(key).rpartition(".")[0]
        while owner and owner not in tables:
            owner = owner.rpartition(".")[0]
        module = owner or module
        out.setdefault(module, {})[str(key)[len(module) :].lstrip(".")] = tensor
    return out


def _check_training(table: Table, own: dict[str, Tensor]) -> None:
    """Parameters and buffers of the training form: exact shapes, floating point."""
    c, n, d = table.config, table.num_embeddings, table.embedding_dim
    c.validate(d)
    shapes = c.method.shapes(c, n, d)
    for name, shape in shapes.items():
        check_tensor(name, own.get(name), Layout(shape))
    K, D = table.options.get("K", 0), table.options.get("D", 0)
    if max(_MOST_CODES, own["values"].numel()) < K * D:
        raise ValueError(f"{D} groups of {K} codes: more than the values hold")
    for tracker in c.method.trackers(c, shapes):
        for name, shape in tracker.buffers().items():
            check_tensor(name, own.get(name), Layout(shape, optional=True))


def _check_stored(table: Table, own: dict[str, Tensor]) -> None:
    form, settings = table.form_class()
    if table.options:
        table.config.validate(table.embedding_dim)
    check_form(form, table.size, settings, own)
    try:
        check_crc32(own, table.checksums)
    except ValueError as error:
        raise ValueError(
            f"{error}, or compact checkpoints were averaged; average the training checkpoints, "
            "then compact"
        ) from error
    form.check_contents(table.embedding_dim, settings, own)


def _check_names(
    path: str, table: Table, by_module: dict[str, dict[str, Tensor]], weights: Weights
) -> None:
    """Aliases name the same tensors; tied layers have none of their own."""
    own = by_module[path]
    for name in (path, *table.aliases):
        if name.split(".")[-1] != _NAME:
            raise ValueError(f"{name} is not the name of a token table ({_NAME})")
    for alias in table.aliases:
        other = by_module.get(alias, {})
        if set(other) != set(own):
            raise ValueError(f"{alias}, another name of it in the record, has other tensors")
        for key, tensor in own.items():
            twin = other[key]
            same = (twin.shape, twin.dtype) == (tensor.shape, tensor.dtype)
            if not same or not (_same_memory(tensor, twin) or torch.equal(tensor, twin)):
                raise ValueError(f"{alias}.{key} is not {path}.{key}, though the record says so")
    for tied in table.tied:
        parent = tied.rpartition(".")[0]
        if f"{tied}.weight" in weights:
            raise ValueError(f"{tied}, tied to it in the record, has a weight of its own")
        if parent and not any(key.startswith(parent + ".") for key in weights):
            raise ValueError(f"{tied}, tied to it in the record, is no layer of this model")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _check_complete(taken: dict[str, Any], by_module: dict[str, dict[str, Tensor]]) -> None:
    """No DPQ table is left out of the record: fairseq could not load it."""
    signatures = {"query", *(form.signature_tensor for form in FORMS.values())}
    for module, own in by_module.items():
        if module.split(".")[-1] == _NAME and module not in taken and signatures & set(own):
            raise _error(module, "is a DPQ table that the record does not name")
