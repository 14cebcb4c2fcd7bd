"""Starting values that depend on data: those of another table."""

from __future__ import annotations

from typing import Callable, Mapping, NamedTuple

import torch
from torch import Tensor


def checked_padding(num_embeddings: int, padding_idx: int | None) -> int | None:
    """The padding row counted from 0; raises if the table has no such row, or no row at all."""
    if num_embeddings < 1:
        raise ValueError(f"num_embeddings={num_embeddings}: must be 1 or more")
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(
            f"padding_idx={padding_idx}: must be within the {num_embeddings} rows of the "
            f"table, from {-num_embeddings} to {num_embeddings - 1}"
        )
    return padding_idx % num_embeddings


def draw_like(parameters: Mapping[str, Tensor], table: Tensor, padding_idx: int | None) -> None:
    """Fill queries, keys and values with numbers drawn from a freshly initialised table."""
    table = table.detach()
    pool = table[real_rows(table, padding_idx)].reshape(-1)
    for name, parameter in parameters.items():
        if name == "query" and parameter.shape == table.shape:
            parameter.copy_(table)
        else:
            pick = torch.randint(pool.numel(), (parameter.numel(),), device=pool.device)
            parameter.copy_(pool[pick].view_as(parameter))


def real_rows(table: Tensor, padding_idx: int | None) -> Tensor:
    """Which rows of a table are not padding: (n,) bool."""
    real = torch.ones(table.shape[0], dtype=torch.bool, device=table.device)
    if padding_idx is not None and table.shape[0] > 1:
        real[padding_idx] = False
    return real


class Trained(NamedTuple):
    """A trained table (n, d) to begin at."""

    table: Tensor
    real: Tensor  # (n,): False for padding
    seed: int = 0
    progress: Callable[[int], None] | None = None
