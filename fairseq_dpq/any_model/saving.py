"""A compressed model in a folder: its tensors as safetensors, the record of its tables as JSON."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import secrets
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fairseq_dpq.any_model.finding import Found, find_tables, identity, placed, put
from fairseq_dpq.checksums import text_crc32
from fairseq_dpq.embedding import dpq_modules
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form, crc32_bits
from fairseq_dpq.forms.fitting import check_form
from fairseq_dpq.printable import printable
from fairseq_dpq.record import Table, TablesRecord
from fairseq_dpq.safetensors_file import (
    DTYPES,
    Opened,
    check_tensor_crc32,
    metadata,
    open_mapped,
)

TENSORS, RECORD = "model.safetensors", "compact.json"
_KIND = "model"  # in the file's config, where an exported table has the kind of its form
_MAX_RECORD = 100_000_000  # bytes


class SavedModelError(ValueError):
    """A folder that is not a saved model, or not one of the model at hand."""


# Saving -------------------------------------------------------------------------------------------


def save_compact(model: nn.Module, directory: str | Path) -> int:
    """Write a compressed model to a folder, without pickle; the number of bytes written.

    `load_compact` reads it into a new model of the same architecture.
    """
    from safetensors.torch import save_file

    record, tensors = compact_state(model)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(json.loads(record.to_json()), indent=2) + "\n"
    config = {"kind": _KIND, "record_crc32": text_crc32(text)}
    meta = metadata(type(model).__name__, config, tensors)
    _write(folder / TENSORS, lambda path: save_file(tensors, str(path), meta))
    _write(folder / RECORD, lambda path: path.write_text(text, encoding="utf-8"))
    return sum((folder / name).stat().st_size for name in (TENSORS, RECORD))


def compact_state(model: nn.Module) -> tuple[TablesRecord, dict[str, Tensor]]:
    """The record of a model's compressed tables, and all tensors to save: each shared one once."""
    if any(dpq_modules(model)):
        raise SavedModelError("the model has tables in training form; call compact(model) first")
    tables = placed(model, Form)
    if not tables:
        raise SavedModelError("the model has no compressed table; call compress(model) first")
    record = TablesRecord({}, stage="compact")
    tensors: dict[str, Tensor] = {}
    for found in tables:
        form: Form = found.module
        form.verify()
        record.tables[found.path] = Table(
            form.num_embeddings,
            form.embedding_dim,
            form.padding_idx,
            options={},
            aliases=found.paths[1:],
            tied=list(found.tied),
            form={"kind": form.kind, **form.settings()},
        )
        for name, tensor in form.export_tensors().items():
            tensors[f"{found.path}.{name}"] = tensor.detach().cpu().contiguous()
    tensors.update(_other_tensors(model))
    return record, tensors


def _other_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What the state_dict has beside compressed tables."""
    out: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    for key, tensor in _state(model).items():
        if not isinstance(tensor, Tensor):
            raise SavedModelError(f"{key} is not a tensor and cannot be saved without pickle")
        if tensor.device.type == "meta":
            raise SavedModelError(f"{key} is on the meta device; load its weights first")
        if tensor.dtype not in DTYPES.values():
            raise SavedModelError(f"{key}: {tensor.dtype} cannot be saved")
        if first.setdefault(identity(tensor), key) == key:
            out[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return out


def _state(model: nn.Module) -> dict[str, Any]:
    """The state_dict without compressed tables."""
    named = model.named_modules(remove_duplicate=False)
    inside = tuple(f"{path}." for path, module in named if isinstance(module, Form))
    return {k: v for k, v in model.state_dict().items() if not k.startswith(inside or ("\0",))}


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """The file appears under its name only when it is complete."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(part)
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


# Loading ------------------------------------------------------------------------------------------


def load_compact(directory: str | Path, model: nn.Module) -> nn.Module:
    """Put a saved model's tensors into a new, full model of the same architecture; returns it.

    The file is memory-mapped, and every checksum is compared. The model is changed only when all
    is right.
    """
    folder = Path(directory)
    record, opened = _open(folder)
    with _said(folder):
        tables = _match(find_tables(model), record)
        forms = {path: _form(record.tables[path], path, opened) for path in record.tables}
        state = _matching_state(model, tables, opened, record)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), None)
    for path, found in zip(record.tables, tables):
        put(model, found, forms[path])
    how = (
        {"assign": True} if "assign" in inspect.signature(model.load_state_dict).parameters else {}
    )
    model.load_state_dict(state, strict=False, **how)  # compared above; tables are there already
    return model if device is None else model.to(device)


def _match(tables: list[Found], record: TablesRecord) -> list[Found]:
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


def build_form(table: Table, tensors: Mapping[str, Tensor]) -> Form:
    """The form of a record's table of these tensors; ValueError for what they cannot be."""
    settings = dict(table.form)
    form = FORMS[settings.pop("kind")]
    size = (table.num_embeddings, table.embedding_dim, table.padding_idx)
    check_form(form, size, settings, tensors)
    for name in form.packed_tensors:
        stored = tensors.get(f"{name}_crc32")
        if stored is not None and stored.tolist() != crc32_bits(tensors[name]).tolist():
            raise ValueError(f"{name} do not match their checksum")
    form.check_contents(size[1], settings, tensors)
    return form.from_tensors(*size, settings, tensors)


def _form(table: Table, path: str, opened: Opened) -> Form:
    prefix = f"{path}."
    tensors = {k[len(prefix) :]: t for k, t in opened.tensors.items() if k.startswith(prefix)}
    try:
        return build_form(table, tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _matching_state(
    model: nn.Module, tables: list[Found], opened: Opened, record: TablesRecord
) -> dict[str, Tensor]:
    """The state for what is not a table; ValueError unless names and shapes are the model's."""
    of_tables = tuple(f"{path}." for path in record.tables)
    saved = {k: t for k, t in opened.tensors.items() if not k.startswith(of_tables)}
    gone = {identity(found.weight) for found in tables if found.weight is not None}
    full = model.state_dict(keep_vars=True)
    wanted = {k: t for k, t in full.items() if identity(t) not in gone}
    twins: dict[Any, str] = {}
    for key, tensor in wanted.items():
        if key in saved:
            twins.setdefault(identity(tensor), key)
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
        if source not in made:  # one Parameter for tied names: they stay tied
            is_parameter = isinstance(tensor, nn.Parameter)
            grad = tensor.requires_grad and found.is_floating_point()
            made[source] = nn.Parameter(found, requires_grad=grad) if is_parameter else found
        state[key] = made[source]
    for key in saved:
        if key not in wanted:
            raise ValueError(f"the model has no {key}")
    return state


def _open(folder: Path) -> tuple[TablesRecord, Opened]:
    """Both files, with every checksum compared."""
    for name in (RECORD, TENSORS):
        if not (folder / name).is_file():
            raise SavedModelError(printable(f"{folder} has no {name}: not a saved model"))
    with _said(folder / RECORD):
        if (folder / RECORD).stat().st_size > _MAX_RECORD:
            raise ValueError("it is too large")
        text = (folder / RECORD).read_bytes().decode("utf-8")
        record = TablesRecord.from_json(text)
        if record.stage != "compact":
            raise ValueError("its tables are not compact")
    with _said(folder / TENSORS):
        opened = open_mapped(folder / TENSORS)
        config = json.loads(opened.meta["config"])
        if not isinstance(config, dict) or config.get("kind") != _KIND:
            raise ValueError("it holds a single table; CompactEmbedding.from_file reads it")
        for name, checksums in opened.unchecked.items():
            check_tensor_crc32(name, opened.tensors[name], checksums)
        if config.get("record_crc32") != text_crc32(text):
            raise ValueError(f"it does not belong to the {RECORD} beside it")
    return record, opened


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """Errors in one line that names the file."""
    try:
        yield
    except SavedModelError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise SavedModelError(printable(f"{path}: {error}")) from error
    except RecursionError as error:
        raise SavedModelError(printable(f"{path}: it is nested too deeply")) from error
