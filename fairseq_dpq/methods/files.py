"""Files that a method starts from: codes of an exported table, a full table."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import Tensor

from fairseq_dpq.files.reader import is_safetensors, read_form
from fairseq_dpq.forms import FORMS

_TAKES = "; it takes one table (n, d) as .pt or .safetensors, or in fairseq a full checkpoint"


def read_codes(file: str, shape: tuple[int, ...], K: int) -> Tensor:
    """The codes (n, D) of a file of fairseq-dpq-export; ValueError if they do not fit."""
    if not Path(file).is_file():
        raise ValueError(f"there is no file of codes {file}")
    form = read_form(file, FORMS)
    codes = form.unpacked_codes()
    if codes is None:
        raise ValueError(f"{file} holds a table of kind {form.kind}, which has no codes")
    if tuple(codes.shape) != shape:
        raise ValueError(
            f"{file} has {codes.shape[1]} codes for each of {codes.shape[0]} rows; this table has "
            f"{shape[0]} rows, and D is {shape[1]}"
        )
    if codes.numel() and int(codes.max()) >= K:
        raise ValueError(f"{file} has the code {int(codes.max())}; K is {K}")
    return codes


def read_table(file: str, path: str, shape: tuple[int, ...]) -> Tensor:
    """The table (n, d) at `path` of a full checkpoint, or, without a path, the only tensor of that
    shape in a file; ValueError if there is none."""
    if not Path(file).is_file():
        raise ValueError(f"there is no checkpoint {file} to distil from")
    try:
        found = _tensors(file)
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f"{file} is not a fairseq checkpoint, or it is damaged{_TAKES}") from error
    if not path:
        fits = [tensor for tensor in found.values() if tuple(tensor.shape) == shape]
        if len(fits) != 1:
            raise ValueError(f"{file} has {len(fits)} tensors of shape {shape}{_TAKES}")
        return fits[0]
    table = found.get(f"{path}.weight", found.get(""))
    if table is None:
        raise ValueError(f"{file} has no full table {path}.weight")
    if tuple(table.shape) != shape:
        raise ValueError(f"{file}: {path}.weight is {tuple(table.shape)}, this table is {shape}")
    return table


def _tensors(file: str) -> dict[str, Tensor]:
    """The tensors of a file by name: of a checkpoint's model, of a state_dict, or a single one."""
    if is_safetensors(file):
        from safetensors.torch import load_file

        return load_file(file)
    how = {"mmap": True} if "mmap" in inspect.signature(torch.load).parameters else {}
    found = torch.load(file, map_location="cpu", **how)
    if isinstance(found, Tensor):
        return {"": found}
    return {name: t for name, t in found.get("model", found).items() if isinstance(t, Tensor)}
