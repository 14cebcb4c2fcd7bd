"""What the library is given: the checks of shapes and memory that every call begins with."""

from __future__ import annotations

from typing import Any, Sequence

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


def dimensions(name: str, tensor: Tensor, names: str) -> tuple[int, ...]:
    """The sizes of a tensor that has one dimension for each of the names."""
    if tensor.dim() != names.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be ({names})")
    return tuple(tensor.shape)


def passed(code: int) -> None:
    """Raise an error unless a call of the library returned 0."""
    if code == library.NO_MEMORY:
        raise MemoryError("the native library has no memory left")
    if code:
        raise ValueError("the native library refuses these shapes")


def check_parts(
    codes: Tensor,
    values: Tensor,
    sizes: Sequence[int],
    shared: bool,
    packed: bool,
    padding_idx: int | None,
) -> None:
    """Raise ValueError where codes, values and sizes do not make a table."""
    if not sizes or min(sizes) < 1 or (shared and len(set(sizes)) > 1):
        raise ValueError(f"sizes={list(sizes)}: give the number of codes of each group")
    if codes.dim() != 2 or values.dim() != 2:
        shapes = tuple(codes.shape), tuple(values.shape)
        raise ValueError(f"codes and values have shapes {shapes}; both must have two dimensions")
    width = max(1, (sum((s - 1).bit_length() for s in sizes) + 7) // 8) if packed else len(sizes)
    if codes.shape[1] != width:
        raise ValueError(f"codes have {codes.shape[1]} columns; {len(sizes)} groups need {width}")
    rows = sizes[0] if shared else sum(sizes)
    if values.shape[0] < rows:
        raise ValueError(f"values have {values.shape[0]} rows; the groups' codes need {rows}")
    if padding_idx is not None and not 0 <= padding_idx < codes.shape[0]:
        raise ValueError(f"padding_idx={padding_idx} is not a row of the {codes.shape[0]}")


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
