"""What the library is given: the checks of shapes and memory that every call begins with."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from fairseq_dpq.native import library
from fairseq_dpq.tracing import is_tracing

BYTES = {torch.uint8: 1, torch.int16: 2, torch.int64: 8}  # of a code
MOST_CODES = 32768
_storage: Any = getattr(Tensor, "untyped_storage", Tensor.storage)  # older releases have one kind


def serves(*tensors: Tensor | None) -> Any:
    """The library, if it can take these tensors."""
    plain = all(t is None or (t.is_cpu and has_memory(t)) for t in tensors)
    return library.load() if plain and not is_tracing() else None


def expect(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError if a tensor has none of these shapes."""
    if tensor.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {wanted}")


def dims(name: str, tensor: Tensor, names: str) -> tuple[int, ...]:
    """The sizes of a tensor that has one dimension for each of the names."""
    if tensor.dim() != names.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be ({names})")
    return tuple(tensor.shape)


def call(function: Any, struct: Any, start: int = 0, **fields: Any) -> None:
    """Call a function of the library with a struct of these fields, tensors by their addresses. An
    error counts rows from `start` on."""
    # The struct and the tensors have names here, so that they live as long as the call.
    job = struct(**{k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in fields.items()})
    code = function(ctypes.addressof(job), torch.get_num_threads())
    if code > 0:
        row = start + code - 1
        raise ValueError(f"codes: row {row} has a code that is not below K={fields['K']}")
    passed(code)


def passed(code: int) -> None:
    """Raise an error unless a call of the library returned 0."""
    if code == library.NO_MEMORY:
        raise MemoryError("the native library has no memory left")
    if code:
        raise ValueError("the native library refuses these shapes")


def has_memory(tensor: Tensor) -> bool:
    """Whether all elements of a tensor can be read at their addresses: no subclass, not sparse, no
    view that negates, no storage that was freed or shrunk."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    try:
        if tensor.is_neg():
            return False
        end = tensor.storage_offset() + 1
        end += sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        return not tensor.numel() or end * tensor.element_size() <= _storage(tensor).nbytes()
    except RuntimeError:  # a tensor without memory of its own, as under vmap
        return False


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and aligned to its elements, copied only if it is not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor
