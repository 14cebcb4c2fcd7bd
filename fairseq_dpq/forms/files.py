"""Tables of files of fairseq-dpq-export: checked when opened, large tensors at their first use."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any, Mapping

from torch import Tensor

from fairseq_dpq.forms.base import Form, Settings, crc32_bits
from fairseq_dpq.forms.fitting import check_form, shown
from fairseq_dpq.printable import printable
from fairseq_dpq.safetensors_file import ExportError, Opened, check_tensor_crc32, open_mapped

_SIZE = ("num_embeddings", "embedding_dim", "padding_idx")
_SMALL = 16 << 20  # bytes of packed rows that are read when the file is opened


def from_file(path: str | Path, forms: Mapping[str, type[Form]]) -> Form:
    """The table of a file of fairseq-dpq-export, in one of these forms by kind.

    A large table is read at its first use, not before; `verify()` reads it at once.
    """
    opened = open_mapped(path)
    try:
        settings = json.loads(opened.meta["config"])
        kind = settings.pop("kind", "product_codes")  # version 1 knows no other
        size: Any = tuple(settings.pop(name) for name in _SIZE)
        if not isinstance(kind, str) or kind not in forms:
            raise ExportError(f"holds a table of kind {shown(kind)}, not {' or '.join(forms)}")
        form = forms[kind]
        tensors = {name: t for name, t in opened.tensors.items() if name != "symbols"}
        check_form(form, size, settings, tensors)
        n, d, pad = size
        module = form.from_tensors(n, d, pad, settings, tensors)
        pending = _Pending(path, opened, form, settings, tensors)
        if opened.unchecked or any(tensors[name].numel() > _SMALL for name in form.packed_tensors):
            module.__class__ = _unread(form)
            module.__dict__["_pending"] = pending
        else:
            pending.check()
        return module
    except KeyError as error:
        raise ExportError(printable(f"{path} is damaged: {error} is missing")) from error
    except ExportError as error:
        raise ExportError(printable(f"{path} {error}")) from error
    except (TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise ExportError(printable(f"{path} is damaged: {error}")) from error


class _Pending:
    """What is still to be checked of an opened file."""

    def __init__(
        self,
        path: str | Path,
        opened: Opened,
        form: type[Form],
        settings: Settings,
        tensors: dict[str, Tensor],
    ) -> None:
        self.path, self.form, self.settings, self.tensors = path, form, settings, tensors
        self.unchecked = {n: crc for n, crc in opened.unchecked.items() if n in tensors}
        self.first_version = opened.meta["version"] == "1"
        self.embedding_dim = json.loads(opened.meta["config"])["embedding_dim"]

    def check(self) -> None:
        for name, crc in self.unchecked.items():
            check_tensor_crc32(name, self.tensors[name], crc)
        for name in self.form.packed_tensors if self.first_version else ():
            if crc32_bits(self.tensors[name]).tolist() != self.tensors[f"{name}_crc32"].tolist():
                raise ExportError(f"is damaged: {name} do not match their checksum")
        self.form.check_contents(self.embedding_dim, self.settings, self.tensors)


class _Unread:
    """A table that is checked before its first use; then its class is the form's own."""

    _pending: _Pending

    def verify(self: Any) -> None:
        pending = self._pending
        try:
            pending.check()
        except ExportError as error:
            raise ExportError(printable(f"{pending.path} {error}")) from error
        except ValueError as error:
            raise ExportError(printable(f"{pending.path} is damaged: {error}")) from error
        self.__class__ = pending.form
        del self.__dict__["_pending"]

    def _checked(self: Any) -> Any:
        self.verify()
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._checked()(*args, **kwargs)

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


@functools.lru_cache(maxsize=None)
def _unread(form: Any) -> type[Form]:
    return type(form.__name__, (_Unread, form), {"__module__": __name__})
