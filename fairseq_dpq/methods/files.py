"""Files that a method starts from: codes of an exported table, the table of a full checkpoint."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import Tensor

from fairseq_dpq.files.reader import read_form
from fairseq_dpq.forms import FORMS


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
    """The table (n, d) at `path` of a full checkpoint; ValueError if it does not fit."""
    if not Path(file).is_file():
        raise ValueError(f"there is no checkpoint {file}")
    how = {"mmap": True} if "mmap" in inspect.signature(torch.load).parameters else {}
    try:
        weights = torch.load(file, map_location="cpu", **how)["model"]
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(f"{file} is not a fairseq checkpoint, or it is damaged") from error
    table = weights.get(f"{path}.weight")
    if table is None:
        raise ValueError(f"{file} has no full table {path}.weight")
    if tuple(table.shape) != shape:
        raise ValueError(f"{file}: {path}.weight is {tuple(table.shape)}, this table is {shape}")
    return table
