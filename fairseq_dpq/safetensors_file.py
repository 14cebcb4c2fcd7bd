"""One table outside fairseq, in a safetensors file. Reading needs torch alone and maps the file,
so that a table of any size opens at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_dpq.memory import memory_of

FORMAT = "fairseq-dpq"
VERSION = 1
_DTYPES = {"U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}
_DTYPES.update({"F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool})
_MAX_HEADER = 100_000_000  # as safetensors has it: a longer one is damage


class ExportError(ValueError):
    """A file that is not an exported table."""


def metadata(name: str, config: dict[str, Any]) -> dict[str, str]:
    """The metadata of a file that is about to be written."""
    return {"format": FORMAT, "version": str(VERSION), "name": name, "config": json.dumps(config)}


def symbols_tensor(symbols: list[str]) -> Tensor:
    """Symbols, row by row, as the bytes of a tensor."""
    return torch.frombuffer(bytearray("\n".join(symbols).encode("utf-8")), dtype=torch.uint8)


def read_symbols(path: str | Path) -> list[str] | None:
    """The symbols of an exported file, row by row; None if it was written without."""
    _, tensors = open_mapped(path)
    if "symbols" not in tensors:
        return None
    symbols = tensors["symbols"].contiguous()
    return bytes(memory_of(symbols)).decode("utf-8").split("\n")


def open_mapped(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors, mapped: the layout is 8 bytes of length, a JSON header, the data."""
    total = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or not 2 <= length <= min(total - 8, _MAX_HEADER):
            raise ExportError(f"{path} is not a safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(length).decode("utf-8"))
            meta = header.pop("__metadata__", {})
        except (ValueError, AttributeError) as error:
            raise ExportError(f"{path} is not a safetensors file") from error
    if meta.get("format") != FORMAT:
        raise ExportError(f"{path} is not a table of fairseq-dpq-export")
    if int(meta["version"]) > VERSION:
        raise ExportError(
            f"{path} is of format version {meta['version']}; this fairseq-dpq reads up to version "
            f"{VERSION}: update it with pip install -U fairseq-dpq"
        )
    everything = torch.from_file(str(path), shared=False, size=total, dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None or not 8 + length <= start <= end <= total:
            raise ExportError(f"{path} is damaged or truncated: {name} reaches beyond its end")
        data = everything[start:end]
        item = torch.empty(0, dtype=dtype).element_size()
        if data.storage_offset() % item:
            data = data.clone()
        try:
            tensors[name] = data.view(dtype).view(entry["shape"])
        except RuntimeError as error:
            raise ExportError(f"{path} is damaged: {name} has another size than it says") from error
    return meta, tensors
