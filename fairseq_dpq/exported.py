"""A table outside fairseq: packed codes, values, options and symbols in one safetensors file.
Reading needs torch alone and maps the file, so that a table of any size opens at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor

from fairseq_dpq.compact import CompactEmbedding, codes_crc32, memory_of

FORMAT = "fairseq-dpq"
VERSION = 1
_DTYPES = {"U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}
_DTYPES.update({"F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool})
_MAX_HEADER = 100_000_000  # as safetensors has it: a longer one is damage


class ExportError(ValueError):
    """A file that is no exported table."""


def contents(
    module: CompactEmbedding, name: str, symbols: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of an exported table, as safetensors takes them."""
    codes = module.packed_codes().contiguous()
    tensors = {
        "codes": codes,
        "values": module.values[: module.value_rows].detach().contiguous(),
        "codes_crc32": codes_crc32(codes),
        "sizes": torch.tensor(module.sizes, dtype=torch.int32),
    }
    if symbols is not None:
        if len(symbols) != module.num_embeddings:
            raise ExportError(f"{len(symbols)} symbols for {module.num_embeddings} rows of {name}")
        text = bytearray("\n".join(symbols).encode("utf-8"))
        tensors["symbols"] = torch.frombuffer(text, dtype=torch.uint8)
    config = {
        "num_embeddings": module.num_embeddings,
        "embedding_dim": module.embedding_dim,
        "padding_idx": module.padding_idx,
        "D": module.D,
        "share_subspaces": module.share_subspaces,
    }
    meta = {"format": FORMAT, "version": str(VERSION), "name": name, "config": json.dumps(config)}
    return tensors, meta


def read_embedding(path: str | Path, cls: type[CompactEmbedding]) -> CompactEmbedding:
    """The table of an exported file, its codes still in the file."""
    meta, tensors = _open(path)
    try:
        config = json.loads(meta["config"])
        n = int(config["num_embeddings"])
        sizes = [int(size) for size in tensors["sizes"]]
        codes, values = tensors["codes"], tensors["values"]
        # One row first: the codes of n rows stay where they are, in the file.
        module = cls(
            1,
            int(config["embedding_dim"]),
            None if config["padding_idx"] is None else 0,
            K=max(sizes),
            D=int(config["D"]),
            share_subspaces=bool(config["share_subspaces"]),
            sizes=sizes,
            packed=True,
            dtype=values.dtype,
        )
        if codes.shape != (n, module.codes.shape[1]) or len(values) != module.value_rows:
            raise ValueError("its tensors do not fit its config")
        module.values[: module.value_rows] = values
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ExportError(f"{path} is damaged: {error}") from error
    module.codes = codes
    module.num_embeddings = n
    module.padding_idx = config["padding_idx"]
    return module.eval()


def read_symbols(path: str | Path) -> list[str] | None:
    """The symbols of an exported file, row by row; None if it was written without."""
    _, tensors = _open(path)
    if "symbols" not in tensors:
        return None
    symbols = tensors["symbols"].contiguous()
    return bytes(memory_of(symbols)).decode("utf-8").split("\n")


def _open(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
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
        raise ExportError(f"{path} is no table of fairseq-dpq-export")
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
