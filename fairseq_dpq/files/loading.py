"""Loading untrusted checkpoints: tensors and plain containers only, each refusal by its name.

Every entry of the file is compared with its CRC-32, in one pass. Then the file is memory-mapped
where torch can do that, so that what nobody needs takes no memory.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pickle
import re
import types
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any, Mapping

import torch
from torch import Tensor

from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.memory import identity
from fairseq_dpq.forms.fitting import is_plain
from fairseq_dpq.marker import plain_globals

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_MAPS = "mmap" in inspect.signature(torch.load).parameters

# What torch itself writes into a file of tensors, for the versions without weights_only=True.
_TENSOR_GLOBALS = (
    "collections.OrderedDict",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
)


# What the parts of a checkpoint are, where they are there
_KINDS: dict[str, Any] = {
    "args": (Namespace, Mapping),
    "cfg": (Namespace, Mapping),
    "optimizer_history": list,
    "extra_state": Mapping,
    "task_state": Mapping,
}
# Bytes of a number in torch's storages, by their names in a file
_WIDTHS = {
    **dict.fromkeys(("CharStorage", "ByteStorage", "BoolStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
_BLOCK = 1 << 20  # bytes read at once
_SPARE = 64 << 20  # bytes that a small file may take too


def load_checkpoint(path: str | Path, trust: bool = False) -> dict[str, Any]:
    """The state of a fairseq checkpoint; with `trust`, code in the file may run."""
    path = Path(path)
    mapped = _check_file(path)
    try:
        state = _load(path, None, mapped) if trust else _load_safely(path, mapped)
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(f"{path} does not fit into memory") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        wanted = re.search(r"GLOBAL ([\w.<>-]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and wanted is not None:
            raise _refusal(path, wanted.group(1)) from error
        if isinstance(error, EOFError) or "EOF" in str(error):
            raise CheckpointError(f"{path} is truncated: copy it again") from error
        raise CheckpointError(f"{path} is not a PyTorch checkpoint, or it is damaged") from error
    return _check_state(path, state)


def _check_file(path: Path) -> bool:
    """Whether the file is of torch's zip format; files that cannot be any checkpoint stop here."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; give a checkpoint file in it")
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not head:
        raise CheckpointError(f"{path} is empty")
    if head != b"PK\x03\x04":
        return False
    try:
        if not zipfile.is_zipfile(path):  # the directory of a zip file is at its end
            raise CheckpointError(f"{path} is truncated: copy it again")
        with zipfile.ZipFile(path) as archive:
            _check_entries(path, archive)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged directory can fail in any way
        raise CheckpointError(f"{path} is damaged: its zip directory cannot be read") from error
    return True


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    """Compare the bytes of each entry with the zip file's own checksum of them, and their number
    with what the pickle says: torch does not do that where it maps the file, and would take the
    bytes of the next entry for numbers."""
    entries = archive.infolist()
    names = {entry.filename.rsplit("/", 1)[-1] for entry in entries}
    if "data.pkl" not in names or "constants.pkl" in names:
        raise CheckpointError(f"{path} is not a fairseq checkpoint but another zip file")
    most, checked = os.path.getsize(path), any(entry.CRC for entry in entries)  # torch may omit it
    for entry in entries:
        # torch stores without compression: what claims more than it takes is damaged, or a bomb
        if entry.file_size != entry.compress_size or entry.file_size > most:
            raise CheckpointError(
                f"{path} is damaged: {entry.filename} claims {entry.file_size} bytes"
            )
        try:
            with archive.open(entry) as file:
                while checked and file.read(_BLOCK):
                    pass
        except Exception as error:  # a wrong checksum, or a header that does not fit
            name = entry.filename.split("/", 1)[-1]
            raise CheckpointError(
                f"{path} is damaged: {name} does not match its checksum; copy it again"
            ) from error
    pickled = next(entry for entry in entries if entry.filename.endswith("data.pkl"))
    pickled.CRC = None  # type: ignore[assignment]  # compared before, or not there
    reader = _StorageReader(io.BytesIO(archive.read(pickled)))
    with contextlib.suppress(Exception):  # a damaged pickle: torch's own reader will say so
        reader.load()
    sizes = {entry.filename.split("/", 1)[-1]: entry.file_size for entry in entries}
    for key, wanted in reader.found.items():
        found = sizes.get(f"data/{key}", wanted)
        if found != wanted:
            raise CheckpointError(
                f"{path} is damaged: data/{key} has {found} bytes, expected {wanted}"
            )


class _Inert:
    """Stands for whatever a pickle makes: takes everything, does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        pass

    __init__ = __setstate__ = __setitem__ = append = add = _ignore


class _StorageReader(pickle._Unpickler):
    """Collects the bytes of each storage that a pickle names; runs nothing of it.

    The one in C would take memory for as many objects as a damaged byte claims.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.found: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, count = pid
        width = _WIDTHS.get(kind.__name__)
        if width is not None:
            self.found[key] = width * count
        return None


def _load_safely(path: Path, mapped: bool) -> Any:
    """Load with the plain list. Only a file that names more, as old ones do, needs fairseq, whose
    import takes two seconds."""
    try:
        return _load(path, plain_globals(), mapped)
    except (pickle.UnpicklingError, CheckpointError) as error:
        if not re.search(r"(GLOBAL|wants) (fairseq|omegaconf)\.", str(error)):
            raise
    from fairseq_dpq.fairseq_plugin import compat

    return _load(path, [*plain_globals(), *compat.safe_globals()], mapped)


def _load(path: Path, allowed: list[Any] | None, mapped: bool) -> Any:
    how: dict[str, Any] = {"map_location": "cpu"}
    if mapped and _MAPS:
        how["mmap"] = True
    source = str(path)
    if allowed is None:
        if _TORCH >= (1, 13):
            how["weights_only"] = False
        return torch.load(source, **how)
    if _TORCH >= (2, 6):
        # On leaving, torch would forget also what was allowed before: add only what is missing.
        known = torch.serialization.get_safe_globals()
        missing = [item for item in allowed if item not in known]
        with torch.serialization.safe_globals(missing):
            return torch.load(source, weights_only=True, **how)
    # Older versions of torch have no allow-list that takes names: the same list, kept here.
    return torch.load(source, pickle_module=_restricted(path, allowed), **how)


def _restricted(path: Path, allowed: list[Any]) -> Any:
    """A stand-in for the pickle module that finds only what the allow-list names."""
    by_name: dict[str, Any] = {}
    for entry in allowed:
        item, name = entry if isinstance(entry, tuple) else (entry, None)
        by_name[name or f"{item.__module__}.{item.__qualname__}"] = item

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full in by_name:
                return by_name[full]
            plain = re.fullmatch(r"torch\.\w+Storage|torch\.(cuda\.)?\w+Storage", full)
            dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if full in _TENSOR_GLOBALS or plain or dtype:
                return super().find_class(module, name)
            raise _refusal(path, full)

    names = {"Unpickler": Unpickler, "load": lambda file, **how: Unpickler(file, **how).load()}
    return types.SimpleNamespace(**{**vars(pickle), **names})


def _refusal(path: Path, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{path} was refused: its pickle wants {wanted}, which is not data and could run code; "
        "if you know where the file comes from, use --trust"
    )


def _check_state(path: Path, state: Any) -> dict[str, Any]:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is not a fairseq checkpoint: {why}")

    if not isinstance(state, dict) or not isinstance(state.get("model"), Mapping):
        raise refuse("it has no 'model' entry")
    weights = state["model"]
    if not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in weights.items()):
        raise refuse("'model' is no table of tensors")
    for key, kinds in _KINDS.items():
        if state.get(key) is not None and not isinstance(state[key], kinds):
            raise refuse(f"its {key} is of type {type(state[key]).__name__}")
    if not state.get("cfg") and not state.get("args"):
        raise refuse("it has neither 'cfg' nor 'args', the configuration of its model")
    _check_sizes(path, weights)
    return state


def _check_sizes(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse tensors that would take far more memory than the file has bytes."""
    limit = 4 * os.path.getsize(path) + _SPARE
    views: set[Any] = set()
    total = 0
    for key, tensor in weights.items():
        if not is_plain(tensor):
            raise CheckpointError(f"{path}: {key} is not a plain tensor")
        if identity(tensor) not in views:
            views.add(identity(tensor))
            total += tensor.numel() * tensor.element_size()
        if total > limit:
            raise CheckpointError(
                f"{path}: {key} claims a size of {tuple(tensor.shape)}; a file of "
                f"{os.path.getsize(path)} bytes cannot hold that"
            )
