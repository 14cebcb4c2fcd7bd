"""The whole table of a layer, built once and kept while it is good."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import Tensor

from fairseq_dpq.training.distances import wide_dtype


class Built(NamedTuple):
    """All rows of a table, and their codes where there are any."""

    rows: Tensor  # (n, d)
    codes: Tensor | None = None  # (n, D)


class TableCache:
    """Holds one built table until a tensor that it comes from changes.

    A table with a gradient is also dropped as soon as the gradient has been taken: its graph is
    gone then, and the next micro-batch needs a new one.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Forget the table."""
        self._state: Any = None
        self._built: Built | None = None

    def get(
        self, sources: Iterable[Tensor], build: Callable[[], Built], compare: bool = False
    ) -> Built:
        """The table that was kept for these sources as they are, or a new one. `compare`: by their
        sums too, because writing to `.data` changes a tensor without a trace."""
        sources = list(sources)
        if any(t.is_inference() for t in sources):  # nothing tells whether they have changed
            return build()
        state: Any = [(t.data_ptr(), t._version) for t in sources]
        if compare and not any(t.is_meta for t in sources):
            state += torch.stack([t.sum(dtype=wide_dtype(t.device)) for t in sources]).tolist()
        if self._built is None or self._state != state:
            self._state, self._built = state, build()
            if self._built.rows.requires_grad:
                self._built.rows.register_hook(lambda _: self.drop())
        return self._built

    def __getstate__(self) -> dict[str, Any]:
        # Neither copied nor pickled: tensors with a graph could not be.
        return {"_state": None, "_built": None}
