"""Tables of files of fairseq-dpq-export: checked when opened; rows of a large one when read."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor

from fairseq_dpq.checksums import BLOCK, block_crc32, count_blocks
from fairseq_dpq.forms.base import Form, Settings, crc32_bits
from fairseq_dpq.forms.fitting import check_form
from fairseq_dpq.printable import printable
from fairseq_dpq.safetensors_file import (
    SMALL,
    ExportError,
    Opened,
    check_tensor_crc32,
    open_mapped,
)

_SIZE = ("num_embeddings", "embedding_dim", "padding_idx")


def from_file(path: str | Path, forms: Mapping[str, type[Form]]) -> Form:
    """The table of a file of fairseq-dpq-export, in one of these forms by kind.

    Rows of a large table are checked when they are first asked for; `verify()` checks all of them.
    """
    opened = open_mapped(path)
    with _said(path):
        return _build(path, opened, forms)


def _build(path: str | Path, opened: Opened, forms: Mapping[str, type[Form]]) -> Form:
    settings = json.loads(opened.meta["config"])
    kind = settings.pop("kind", "product_codes")  # version 1 knows no other
    size: Any = tuple(settings.pop(name) for name in _SIZE)
    if not isinstance(kind, str) or kind not in forms:
        raise ExportError(f"holds a table of kind {str(kind)[:40]}, not {' or '.join(forms)}")
    form = forms[kind]
    tensors = {name: tensor for name, tensor in opened.tensors.items() if name != "symbols"}
    check_form(form, size, settings, tensors)
    pending = _Pending(path, opened, form, size[1], settings, tensors)
    n, d, pad = size
    module = form.from_tensors(n, d, pad, settings, tensors)
    if pending.by_row:
        cls: Any = form
        module.__class__ = _unread(cls)
        module.__dict__["_pending"] = pending
    return module


class _Pending:
    """What is still to be checked of an opened file, block by block as rows are read."""

    def __init__(
        self,
        path: str | Path,
        opened: Opened,
        form: type[Form],
        embedding_dim: int,
        settings: Settings,
        tensors: dict[str, Tensor],
    ) -> None:
        self.path, self.form, self.tensors = path, form, tensors
        self.embedding_dim, self.settings = embedding_dim, settings
        self.first_version = opened.meta["version"] == "1"
        self.checksums = opened.unchecked
        rows = len(tensors[form.mark])
        self.by_row: dict[str, Tensor] = {}  # tensors with a row for each symbol: blocks seen
        for name, tensor in tensors.items():
            large = tensor.numel() * tensor.element_size() > SMALL
            if large and len(tensor) == rows and (name in self.checksums or self.first_version):
                self.by_row[name] = torch.zeros(count_blocks(tensor), dtype=torch.bool)
            elif name in self.checksums:
                check_tensor_crc32(name, tensor, self.checksums[name])
        if form.mark not in self.by_row:
            self._check_packed()
            form.check_contents(embedding_dim, settings, tensors)

    def _check_packed(self) -> None:
        """The checksums of version 1, which cover packed rows as a whole."""
        for name in self.form.packed_tensors:
            stored = self.tensors.get(f"{name}_crc32")
            if stored is not None and stored.tolist() != crc32_bits(self.tensors[name]).tolist():
                raise ExportError(f"is damaged: {name} do not match their checksum")

    def check_rows(self, rows: Tensor) -> None:
        """Check the blocks that hold these rows."""
        for name, seen in self.by_row.items():
            tensor = self.tensors[name]
            width = tensor[0].numel() * tensor.element_size()
            inside = rows[(rows >= 0) & (rows < len(tensor))].long().cpu()
            first, last = inside * width // BLOCK, ((inside + 1) * width - 1) // BLOCK
            for block in torch.cat([first, last]).unique().tolist():
                if not seen[block]:
                    self._check_block(name, tensor, block, width)
                    seen[block] = True

    def _check_block(self, name: str, tensor: Tensor, block: int, width: int) -> None:
        wanted = self.checksums.get(name)
        if wanted is not None and block_crc32(tensor, block) != wanted[block]:
            raise ExportError(f"is damaged: {name} does not match its checksum")
        if name == self.form.mark:
            part = tensor[block * BLOCK // width : -(-(block + 1) * BLOCK // width)]
            contents = {**self.tensors, name: part}
            self.form.check_contents(self.embedding_dim, self.settings, contents)

    def check(self) -> None:
        """Check all that is left."""
        self._check_packed()
        for name, seen in self.by_row.items():
            tensor = self.tensors[name]
            for block in (~seen).nonzero().flatten().tolist():
                self._check_block(name, tensor, block, tensor[0].numel() * tensor.element_size())


class _Unread:
    """A table whose rows are checked as they are read. What needs the whole table checks it and
    gives the module the form's own class."""

    _pending: _Pending

    def verify(self: Any) -> None:
        with _said(self._pending.path):
            self._pending.check()
        self.__class__ = self._pending.form
        del self.__dict__["_pending"]

    def _checked(self: Any) -> Any:
        self.verify()
        return self

    def __call__(self: Any, indices: Tensor) -> Tensor:
        with _said(self._pending.path):
            self._pending.check_rows(indices.reshape(-1))
        return super().__call__(indices)  # type: ignore[misc]

    def __prepare_scriptable__(self) -> Any:
        return self._checked()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._checked().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._checked(), memo)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return self._checked()._apply(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._checked()._save_to_state_dict(*args)

    def unpacked_codes(self) -> Tensor:
        return self._checked().unpacked_codes()

    def packed_codes(self) -> Tensor:
        return self._checked().packed_codes()

    def export_tensors(self) -> dict[str, Tensor]:
        return self._checked().export_tensors()


@contextlib.contextmanager
def _said(path: str | Path) -> Iterator[None]:
    """Errors in one line that names the file."""
    try:
        yield
    except KeyError as error:
        raise ExportError(printable(f"{path} is damaged: {error} is missing")) from error
    except ExportError as error:
        raise ExportError(printable(f"{path} {error}")) from error
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ExportError(printable(f"{path} is damaged: {error}")) from error


@functools.lru_cache(maxsize=None)
def _unread(form: Any) -> Any:
    return type(form.__name__, (_Unread, form), {"__module__": __name__})
