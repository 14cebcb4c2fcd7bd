"""A compressed model in a folder: a safetensors file of its tensors, and the tables' record."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Mapping

import torch
from torch import Tensor, nn

from fairseq_dpq.files.errors import CheckpointError, naming, printable
from fairseq_dpq.files.memory import identity, tensors_crc32
from fairseq_dpq.files.reader import TensorFile, metadata, read_tensors
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.files.writer import DTYPES, write_tensors, write_whole
from fairseq_dpq.forms.base import Form, Layout, below
from fairseq_dpq.forms.fitting import check_tensor
from fairseq_dpq.layer import DPQEmbedding, dpq_modules
from fairseq_dpq.model import EmbeddingTable, find_tables, placed, put

TENSORS = "model.safetensors"
_KIND = "model"  # in the file's config, where an exported table has the kind of its form


class SavedModelError(CheckpointError):
    """A folder that is not a saved model, or not one of the model at hand."""


# Saving -------------------------------------------------------------------------------------------


def save_compact(model: nn.Module, directory: str | Path) -> int:
    """Write a compressed model to a folder, without pickle; the number of bytes written.

    It is one file. A save that is killed leaves the file of the save before it. `load_compact`
    reads it into a new model of the same architecture.
    """
    if any(dpq_modules(model)):
        raise SavedModelError("the model has tables in training form; call compact(model) first")
    record, tensors = saved_tables(model)
    tensors.update(other_tensors(model))
    target = Path(directory) / TENSORS
    target.parent.mkdir(parents=True, exist_ok=True)
    config = {"kind": _KIND, "record": json.loads(record.to_json())}
    meta = metadata(type(model).__name__, config, tensors)
    with naming(target, SavedModelError):
        write_whole(target, lambda file: write_tensors(file, tensors, meta), force=True)
    return target.stat().st_size


def saved_tables(model: nn.Module) -> tuple[TablesRecord, dict[str, Tensor]]:
    """The record of a model's tables, compressed or in training, and their tensors."""
    tables = placed(model, (Form, DPQEmbedding))
    if not tables:
        raise SavedModelError("the model has no compressed table; call compress(model) first")
    record = TablesRecord({}, stage="compact")
    tensors: dict[str, Tensor] = {}
    for found in tables:
        module: Form | DPQEmbedding = found.module
        table = Table(module.num_embeddings, module.embedding_dim, module.padding_idx, options={})
        table.aliases, table.tied = found.paths[1:], list(found.tied)
        if isinstance(module, Form):
            table.form = {"kind": module.kind, **module.settings()}
            own = module.export_tensors()
        else:
            record.stage = "training"
            table.options = module.config.keywords()
            own = module.state_dict()
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
        table.checksums = tensors_crc32(own) if table.form else {}
        record.tables[found.path] = table
        tensors.update({f"{found.path}.{name}": tensor for name, tensor in own.items()})
    return record, tensors


def other_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What the state_dict has beside the tables, each shared tensor once."""
    out: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    named = model.named_modules(remove_duplicate=False)
    kinds = (Form, DPQEmbedding)
    tables = tuple(f"{path}." for path, module in named if isinstance(module, kinds))
    for key, tensor in model.state_dict().items():
        if key.startswith(tables):
            continue
        if not isinstance(tensor, Tensor):
            raise SavedModelError(f"{key} is not a tensor and cannot be saved without pickle")
        if tensor.device.type == "meta":
            raise SavedModelError(f"{key} is on the meta device; load its weights first")
        if tensor.dtype not in DTYPES.values():
            raise SavedModelError(f"{key}: {tensor.dtype} cannot be saved")
        if first.setdefault(identity(tensor), key) == key:
            out[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return out


# Loading ------------------------------------------------------------------------------------------


def load_compact(directory: str | Path, model: nn.Module) -> nn.Module:
    """Put a saved model's tensors into a new, full model of the same architecture; returns it.

    The file is memory-mapped, and every checksum is compared. The model is changed only when all
    is right.
    """
    folder = Path(directory)
    path = folder / TENSORS
    if not path.is_file():
        raise SavedModelError(printable(f"{folder} has no {TENSORS}: not a saved model"))
    with naming(path, SavedModelError):
        opened = read_tensors(path)
        if opened.config.get("kind") != _KIND:
            raise ValueError("it holds a single table; CompactEmbedding.from_file reads it")
        record = TablesRecord.from_json(json.dumps(opened.config["record"]))
        if record.stage != "compact":
            raise ValueError("its tables are not compact")
    with naming(folder, SavedModelError):
        tables = _match(find_tables(model), record)
        forms = {}
        for name, table in record.tables.items():
            with naming(f"{folder}: {name}", SavedModelError):
                forms[name] = table.build_form(below(name, opened.tensors))
        state = _matching_state(model, tables, opened, record)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), None)
    for name, found in zip(record.tables, tables):
        put(model, found, forms[name])
    takes = inspect.signature(model.load_state_dict).parameters
    how = {"assign": True} if "assign" in takes else {}
    model.load_state_dict(state, strict=False, **how)  # compared above; tables are there already
    return model if device is None else model.to(device)


def _match(tables: list[EmbeddingTable], record: TablesRecord) -> list[EmbeddingTable]:
    """The tables of a model that a record means, in its order; ValueError if they do not fit."""
    by_path = {path: found for found in tables for path in found.paths}
    out = []
    for path, table in record.tables.items():
        found = by_path.get(path)
        if found is None:
            listed = ", ".join(by_path) or "none"
            raise ValueError(f"the model has no embedding table {path}; it has {listed}")
        if found.problem:
            raise ValueError(f"{path}: {found.problem}")
        shape = (found.module.num_embeddings, found.module.embedding_dim)
        if shape != (table.num_embeddings, table.embedding_dim):
            saved = f"{table.num_embeddings} x {table.embedding_dim}"
            raise ValueError(f"{path} is {shape[0]} x {shape[1]} in the model, {saved} as saved")
        for what, mine, theirs in (
            ("shared with", found.paths, [path, *table.aliases]),
            ("tied to", list(found.tied), table.tied),
        ):
            if set(mine) != set(theirs):
                raise ValueError(
                    f"{path} is {what} {_names(mine, path)} in the model, {_names(theirs, path)} "
                    "as saved"
                )
        out.append(found)
    return out


def _names(paths: list[str], own: str) -> str:
    return " and ".join(path for path in paths if path != own) or "nothing"


def training_shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a record's table in training form."""
    # One row: no n rows by a claim alone.
    small = DPQEmbedding(1, table.embedding_dim, option_files=False, **table.options)
    return small.method.shapes(small.config, table.num_embeddings, table.embedding_dim)


def build_layer(table: Table, tensors: Mapping[str, Tensor]) -> DPQEmbedding:
    """The training form of a record's table; ValueError for tensors that are not its own."""
    for name, shape in training_shapes(table).items():
        check_tensor(name, tensors.get(name), Layout(tuple(shape)))
    how = {"dtype": tensors["query"].dtype, "option_files": False, **table.options}
    layer = DPQEmbedding(*table.size, **how)
    for name, tensor in layer.state_dict().items():
        check_tensor(name, tensors.get(name), Layout(tuple(tensor.shape)))
    layer.load_state_dict(dict(tensors))
    return layer


def _matching_state(
    model: nn.Module, tables: list[EmbeddingTable], opened: TensorFile, record: TablesRecord
) -> dict[str, Tensor]:
    """The state for what is not a table; ValueError unless names and shapes are the model's."""
    of_tables = tuple(f"{path}." for path in record.tables)
    saved = {k: t for k, t in opened.tensors.items() if not k.startswith(of_tables)}
    gone = {identity(found.weight) for found in tables if found.weight is not None}
    full = model.state_dict(keep_vars=True)
    wanted = {k: t for k, t in full.items() if identity(t) not in gone}
    twins = {identity(t): key for key, t in reversed(wanted.items()) if key in saved}
    made: dict[str, Tensor] = {}
    state = {}
    for key, tensor in wanted.items():
        source = key if key in saved else twins.get(identity(tensor))
        if source is None:
            raise ValueError(f"{key} is missing")
        found = saved[source]
        if found.shape != tensor.shape:
            raise ValueError(
                f"{key} has shape {tuple(tensor.shape)} in the model, {tuple(found.shape)} as saved"
            )
        floats = tensor.is_floating_point() and found.is_floating_point()  # any of them will do
        if found.dtype != tensor.dtype and not floats:
            raise ValueError(f"{key} is {tensor.dtype} in the model, {found.dtype} as saved")
        if source not in made:  # one Parameter for tied names: they stay tied
            is_parameter = isinstance(tensor, nn.Parameter)
            grad = tensor.requires_grad and found.is_floating_point()
            made[source] = nn.Parameter(found, requires_grad=grad) if is_parameter else found
        state[key] = made[source]
    for key in sorted(set(saved) - set(wanted)):
        raise ValueError(f"the model has no {key}")
    return state
