"""One table outside fairseq, in a safetensors file. Reading needs torch alone and maps the file,
so that a table of any size opens at once."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import torch
from torch import Tensor

from fairseq_dpq.checksums import blocks_crc32, count_blocks, text_crc32
from fairseq_dpq.memory import memory_of
from fairseq_dpq.printable import printable
from fairseq_dpq.version import __version__

FORMAT = "fairseq-dpq"
VERSION = 2
DTYPES = {"U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}
DTYPES.update({"F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool})
DTYPES.update({"F64": torch.float64, "I64": torch.int64, "I16": torch.int16, "I8": torch.int8})
_MAX_HEADER = 100_000_000  # as safetensors has it: a longer one is damage
SMALL = 16 << 20  # bytes of a tensor that is checked when the file is opened: some milliseconds
_CHECKED = ("version", "name", "config", "checksums")  # metadata under the checksum


class ExportError(ValueError):
    """A file that is not an exported table."""


@dataclass
class Opened:
    """An exported file, mapped."""

    meta: dict[str, str]
    tensors: dict[str, Tensor]
    unchecked: dict[str, list[int]]  # checksums of tensors that are too large to be read at once


def metadata(name: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a file that is about to be written."""
    meta = {"version": str(VERSION), "name": name, "config": json.dumps(config)}
    checksums = {key: blocks_crc32(tensor) for key, tensor in sorted(tensors.items())}
    meta["checksums"] = json.dumps(checksums)
    own = {"format": FORMAT, "written_by": f"fairseq-dpq {__version__}"}
    return {**own, **meta, "crc32": str(_meta_crc32(meta))}


def _meta_crc32(meta: Mapping[str, str]) -> int:
    return text_crc32(json.dumps([meta[key] for key in _CHECKED]))


def symbols_tensor(symbols: list[str]) -> Tensor:
    """Symbols, row by row, as the bytes of a tensor."""
    return torch.frombuffer(bytearray("\n".join(symbols).encode("utf-8")), dtype=torch.uint8)


def read_symbols(path: str | Path) -> list[str] | None:
    """The symbols of an exported file, row by row; None if it was written without."""
    opened = open_mapped(path)
    if "symbols" not in opened.tensors:
        return None
    symbols = opened.tensors["symbols"].contiguous()
    try:
        if "symbols" in opened.unchecked:
            check_tensor_crc32("symbols", symbols, opened.unchecked["symbols"])
        listed = bytes(memory_of(symbols)).decode("utf-8").split("\n")
        rows = json.loads(opened.meta["config"])["num_embeddings"]
    except ExportError as error:
        raise ExportError(printable(f"{path} {error}")) from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ExportError(printable(f"{path} is damaged: {error}")) from error
    if len(listed) != rows:
        raise ExportError(
            printable(f"{path} is damaged: {len(listed)} symbols of {rows!r:.20} rows")
        )
    return listed


def check_tensor_crc32(name: str, tensor: Tensor, wanted: list[int]) -> None:
    """Raise ExportError for a tensor that is not the one that was written."""
    if blocks_crc32(tensor) != wanted:
        raise ExportError(f"is damaged: {name} does not match its checksum")


def is_export(path: str | Path) -> bool:
    """Whether a file looks like safetensors: a length, then a JSON object."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError:
        return False
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER


def open_mapped(path: str | Path) -> Opened:
    """Metadata and tensors, mapped: the layout is 8 bytes of length, a JSON header, the data.

    What the header says is compared with the file. Checksums are compared too, but those of large
    tensors are left to whoever reads them.
    """
    try:
        return _open(path)
    except ExportError as error:
        raise ExportError(printable(f"{path} {error}")) from error.__cause__


def _open(path: str | Path) -> Opened:
    total = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or not 2 <= length <= min(total - 8, _MAX_HEADER):
            raise ExportError("is not a safetensors file")
        try:
            header = json.loads(file.read(length).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ExportError("is not a safetensors file") from error
    if not isinstance(header, dict):
        raise ExportError("is not a safetensors file")
    meta = _checked_metadata(header.pop("__metadata__", {}))
    everything = torch.from_file(str(path), shared=False, size=total, dtype=torch.uint8)
    data = everything[8 + length :]
    tensors = {name: _tensor(name, entry, data) for name, entry in header.items()}
    used = sum(t.numel() * t.element_size() for t in tensors.values())
    if used != len(data):
        raise ExportError(
            f"is damaged or truncated: its tensors take {used} bytes, {len(data)} are there"
        )
    return Opened(meta, tensors, _check_small(meta, tensors))


def _checked_metadata(meta: Any) -> dict[str, str]:
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ExportError("is not a table of fairseq-dpq-export")
    if not all(isinstance(value, str) for value in meta.values()):
        raise ExportError("is damaged: its metadata are not text")
    version = meta.get("version", "")
    if not version.isascii() or not version.isdigit() or not 1 <= len(version) <= 9:
        raise ExportError(f"is damaged: there is no format version {version!r:.40}")
    if int(version) > VERSION:
        raise ExportError(
            f"is of format version {version}; this fairseq-dpq reads up to version {VERSION}: "
            "update it with pip install -U fairseq-dpq"
        )
    if int(version) >= 2:
        missing = [key for key in (*_CHECKED, "crc32") if key not in meta]
        if missing:
            raise ExportError(f"is damaged: its metadata have no {missing[0]}")
        if meta["crc32"] != str(_meta_crc32(meta)):
            raise ExportError("is damaged: its metadata do not match their checksum")
    return meta


def _tensor(name: str, entry: Any, data: Tensor) -> Tensor:
    """A tensor of the data, if the header's entry describes one."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ExportError(f"is damaged: {name} has no dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ExportError(f"is damaged: {name} has the unknown dtype {entry['dtype']!r:.40}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise ExportError(f"is damaged: {name} has no sizes but {shape!r:.40} and {offsets!r:.40}")
    start, end = offsets
    item = torch.empty(0, dtype=dtype).element_size()
    if not start <= end <= len(data):
        raise ExportError(f"is damaged or truncated: {name} reaches beyond its end")
    if math.prod(shape) * item != end - start or max(shape, default=0) > len(data):
        raise ExportError(f"is damaged: {name} has another size than it says")
    part = data[start:end]
    if part.storage_offset() % item:
        part = part.clone()
    return part.view(dtype).view(shape)


def _sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value)
    )


def _check_small(meta: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    """Compare the checksums of small tensors; those of the others."""
    if meta["version"] == "1":
        return {}
    try:
        wanted: dict[str, list[int]] = json.loads(meta["checksums"])
        complete = set(wanted) == set(tensors)
    except (TypeError, ValueError, RecursionError) as error:
        raise ExportError("is damaged: its checksums cannot be read") from error
    if not complete or not isinstance(wanted, dict):
        raise ExportError("is damaged: its checksums are not those of its tensors")
    large = {}
    for name, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() > SMALL:
            if not isinstance(wanted[name], list) or len(wanted[name]) != count_blocks(tensor):
                raise ExportError(f"is damaged: {name} has other checksums than it needs")
            large[name] = wanted[name]
        else:
            check_tensor_crc32(name, tensor, wanted[name])
    return large
