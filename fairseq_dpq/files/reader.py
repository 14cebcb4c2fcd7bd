"""The reader of safetensors files, exported tables and saved models: memory-mapped, and every
checksum compared once, when the file is opened."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import torch
from torch import Tensor

from fairseq_dpq.files.errors import CheckpointError, naming, printable
from fairseq_dpq.files.memory import check_crc32, memory_of, tensors_crc32, text_crc32
from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.fitting import build_form, check_type, check_version
from fairseq_dpq.version import __version__

FORMAT = "fairseq-dpq"
VERSION = 3
_SIGNED = ("version", "name", "config", "checksums")  # metadata under the checksum
_SIZE = ("num_embeddings", "embedding_dim", "padding_idx")
SYMBOLS = "symbols"  # a tensor of text beside those of a table


@dataclass
class TensorFile:
    """An opened file: what it says of its tensors, and the tensors, mapped."""

    path: str | Path
    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def form(self, forms: Mapping[str, type[Form]]) -> Form:
        """The table of a file of fairseq-dpq-export, in one of these forms by kind."""
        with naming(self.path):
            settings = dict(self.config)
            kind = settings.pop("kind")
            size: Any = tuple(settings.pop(name) for name in _SIZE)
            if not isinstance(kind, str) or kind not in forms:
                known = " or ".join(forms)
                raise ValueError(f"it holds a table of kind {str(kind)[:40]}, not {known}")
            tensors = {name: t for name, t in self.tensors.items() if name != SYMBOLS}
            return build_form(forms[kind], size, settings, tensors)

    def symbols(self) -> list[str] | None:
        """The symbols of an exported file, row by row; None if it was written without."""
        tensor = self.tensors.get(SYMBOLS)
        if tensor is None:
            return None
        with naming(self.path):
            symbols = bytes(memory_of(tensor.contiguous())).decode("utf-8").split("\n")
            if len(symbols) != self.config["num_embeddings"]:
                raise ValueError(f"it has {len(symbols)} symbols for another number of rows")
        return symbols


def metadata(name: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a file that is about to be written."""
    meta = {"version": str(VERSION), "name": name, "config": json.dumps(config)}
    meta["checksums"] = json.dumps(tensors_crc32(tensors))
    own = {"format": FORMAT, "written_by": f"fairseq-dpq {__version__}"}
    return {**own, **meta, "crc32": str(_crc32(meta))}


def _crc32(meta: Mapping[str, str]) -> int:
    return text_crc32(json.dumps([meta[key] for key in _SIGNED]))


def is_safetensors(path: str | Path) -> bool:
    """Whether a file looks like safetensors: a length, then a JSON object."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError:
        return Path(path).suffix == ".safetensors"
    return head[8:] == b"{" and head[4:8] == b"\0\0\0\0"


def read_tensors(path: str | Path) -> TensorFile:
    """Open a file. What it says and all its bytes are compared with their checksums."""
    from safetensors import SafetensorError, safe_open

    try:
        with naming(path), safe_open(str(path), framework="pt") as file:
            meta = _checked(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            checksums, config = json.loads(meta["checksums"]), json.loads(meta["config"])
            for what, value in (("checksums", checksums), ("config", config)):
                check_type(what, value, dict)
            check_crc32(tensors, checksums)
            return TensorFile(path, meta["name"], config, tensors)
    except SafetensorError as error:
        text = f"{path} is not a safetensors file, or it is damaged: {error}"
        raise CheckpointError(printable(text)) from error
    except OSError as error:
        text = f"cannot read {path}: {error.strerror or error}"
        raise CheckpointError(printable(text)) from error


def _checked(meta: Mapping[str, str] | None) -> Mapping[str, str]:
    if not meta or meta.get("format") != FORMAT:
        raise ValueError("not written by fairseq-dpq-export or save_compact")
    check_version(meta.get("version", ""), VERSION, meta.get("written_by"))
    if meta["crc32"] != str(_crc32(meta)):
        raise ValueError("its metadata do not match their checksum: the file is damaged")
    return meta


def read_form(path: str | Path, forms: Mapping[str, type[Form]]) -> Form:
    """The table of a file of fairseq-dpq-export, in one of these forms by kind."""
    return read_tensors(path).form(forms)


def table_config(form: Form) -> dict[str, Any]:
    """The `config` of a file that holds one table."""
    return {"kind": form.kind, **{name: getattr(form, name) for name in _SIZE}, **form.settings()}


def symbols_tensor(symbols: list[str]) -> Tensor:
    """Symbols, row by row, as the bytes of a tensor."""
    return torch.frombuffer(bytearray("\n".join(symbols).encode("utf-8")), dtype=torch.uint8)


def read_symbols(path: str | Path) -> list[str] | None:
    """The symbols of an exported file, row by row; None if it was written without."""
    return read_tensors(path).symbols()
