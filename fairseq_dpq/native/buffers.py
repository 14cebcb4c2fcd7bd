"""What the library and Triton are given: the tensors of a compact table and how they are read, and
whether the memory of a tensor can be."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

MOST_CODES = 32768
CPU = torch.device("cpu")  # torch 1.12 has no Tensor.is_cpu
_storage: Any = getattr(Tensor, "untyped_storage", Tensor.storage)  # older releases have one kind


class Buffers(NamedTuple):
    """Codes and values of a table, with what says how to read them."""

    codes: Tensor  # (n, D), or (n, bytes) if packed
    values: Tensor  # (rows, d / D), the rows of group j after those of group j - 1
    sizes: Sequence[int]  # number of codes of each group
    shared: bool  # whether all groups use the same rows
    packed: bool
    padding_idx: int | None

    @property
    def bits(self) -> list[int]:
        return [(size - 1).bit_length() for size in self.sizes]

    @property
    def value_rows(self) -> int:
        """Rows of values that codes can name; a row for padding may follow them."""
        return self.sizes[0] if self.shared else sum(self.sizes)

    def check(self) -> None:
        """Raise ValueError where codes, values and sizes do not make a table."""
        codes, values, sizes, shared, packed, padding_idx = self
        if not sizes or min(sizes) < 1 or (shared and len(set(sizes)) > 1):
            raise ValueError(f"sizes={list(sizes)}: give the number of codes of each group")
        if codes.dim() != 2 or values.dim() != 2:
            shapes = tuple(codes.shape), tuple(values.shape)
            raise ValueError(f"codes and values of shapes {shapes} must have two dimensions each")
        (n, columns), rows = codes.shape, values.shape[0]
        width = max(1, (sum(self.bits) + 7) // 8) if packed else len(sizes)
        if columns != width:
            raise ValueError(f"codes have {columns} columns; {len(sizes)} groups need {width}")
        if rows < self.value_rows:
            raise ValueError(f"values have {rows} rows; the groups' codes need {self.value_rows}")
        if padding_idx is not None and not 0 <= padding_idx < n:
            raise ValueError(f"padding_idx={padding_idx} is not a row of the {n}")


def products(rows: Tensor, values: Tensor, sizes: Sequence[int], shared: bool) -> Tensor:
    """The products of rows (batch, D, d / D) with the values (rows, d / D) of each group, in
    PyTorch: (codes of all groups, batch), contiguous."""
    values = values.to(rows.dtype)
    if shared:
        found = torch.einsum("bjs,ks->jkb", rows, values)
    elif len(set(sizes)) == 1:
        found = torch.einsum("bjs,jks->jkb", rows, values.view(len(sizes), -1, values.shape[1]))
    else:
        parts = values.split(list(sizes))
        found = torch.cat([part @ rows[:, j].t() for j, part in enumerate(parts)])
    # One column must lie as such: embedding_bag is thirty times slower on other strides.
    return found.reshape(-1).view(-1, rows.shape[0])


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the memory behind a tensor."""
    return _storage(tensor).nbytes()


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
        return not tensor.numel() or end * tensor.element_size() <= storage_bytes(tensor)
    except RuntimeError:  # a tensor without memory of its own, as under vmap
        return False


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and aligned to its elements, copied only if it is not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor
