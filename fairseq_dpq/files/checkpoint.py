"""What a checkpoint holds: its model config, its DPQ tables in either form, bytes of its parts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fairseq_dpq.fairseq_plugin.configs import read_record
from fairseq_dpq.fairseq_plugin.validation import check_record
from fairseq_dpq.files.errors import CheckpointError, naming
from fairseq_dpq.files.loading import load_checkpoint
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.forms.base import Form
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.training.trackers import is_plain

_ROWS = 1 << 16  # rows looked at together

Progress = Callable[[str, int], Callable[[int], None]]  # (what, total) -> report of work done


@dataclass
class Checkpoint:
    """A loaded file."""

    path: Path
    state: dict[str, Any]
    file_bytes: int
    _record: TablesRecord | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path, trust: bool = False) -> Checkpoint:
        state = load_checkpoint(path, trust)
        return cls(Path(path), state, os.path.getsize(path))

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.state["model"]

    @property
    def model_cfg(self) -> Any:
        """The model's config: a Namespace, a dict or a DictConfig."""
        cfg = self.state.get("cfg")
        if cfg is None or (isinstance(cfg, Mapping) and not cfg):
            return self.state["args"]  # of fairseq 0.9 and before
        try:
            model = cfg["model"]
        except (KeyError, TypeError):
            model = None
        if model is None or isinstance(model, (str, list, tuple, Tensor, int, float)):
            raise CheckpointError(f"{self.path} is not a fairseq checkpoint: its cfg has no model")
        return model

    def record(self) -> TablesRecord | None:
        """The record of its DPQ tables; None for a model without any."""
        if self._record is None:
            with naming(self.path):
                record = read_record(self.model_cfg)
                if record is not None:
                    check_record(record, self.weights)
                self._record = record
        return self._record

    def dpq_record(self) -> TablesRecord:
        """The record of its DPQ tables; a model without any is an error."""
        record = self.record()
        if record is None or not record.tables:
            raise CheckpointError(
                f"{self.path} has no DPQ table: it was trained without --dpq-K; "
                "fairseq-dpq-quantize makes a compact model of it"
            )
        return record


def named(path: str, table: Table) -> list[str]:
    """All module paths of one table."""
    return [path, *table.aliases]


def keys_of(weights: Mapping[str, Tensor], paths: Iterable[str]) -> list[str]:
    """The keys of a state_dict that belong to these modules."""
    inside = tuple(f"{path}." for path in paths)
    return [key for key in weights if inside and key.startswith(inside)]


def table_keys(weights: Mapping[str, Tensor], record: TablesRecord | None) -> set[str]:
    """The keys of a state_dict that belong to the tables of a record."""
    tables = record.tables if record else {}
    return set(keys_of(weights, [name for path, t in tables.items() for name in named(path, t)]))


def inference_form(
    checkpoint: Checkpoint,
    path: str,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Form:
    """A table of a checkpoint of either stage in the form that inference uses."""
    record = checkpoint.dpq_record()
    table = record.tables[path]
    if record.stage == "compact":
        form = stored_form(checkpoint, path, table)
        return form if dtype is None else form.to(dtype)
    report = progress(path, table.num_embeddings) if progress is not None else None
    layer = training_layer(checkpoint, path, table)
    return layer.compact(packed=True, dtype=dtype or torch.float32, progress=report)


def training_layer(checkpoint: Checkpoint, path: str, table: Table) -> DPQEmbedding:
    """A table in its training form, for evaluation, on the checkpoint's own memory.

    `table` is of `checkpoint.record()`, so that its tensors are known to fit.
    """
    n, d = table.num_embeddings, table.embedding_dim
    check_warmed_up(checkpoint, path)
    # One row: a layer of n would draw n random rows first.
    layer = DPQEmbedding(1, d, option_files=False, **table.options)
    buffers = [name for tracker in layer.trackers for name in tracker.evaluated]
    for name in (*layer.parts, *buffers):
        key = f"{path}.{name}"
        tensor = checkpoint.weights.get(key)
        if tensor is None:
            raise CheckpointError(f"{checkpoint.path} has no {key}; its record names the table")
        _check_finite(checkpoint, key, tensor)
        if name in layer._parameters:
            layer._parameters[name] = nn.Parameter(tensor.detach(), requires_grad=False)
        else:
            layer._buffers[name] = tensor
    layer.num_embeddings = n
    layer.padding_idx = None if table.padding_idx is None else table.padding_idx % n
    return layer.eval()


def check_warmed_up(checkpoint: Checkpoint, path: str) -> None:
    """Raise for a table that has no codes yet."""
    schedule = checkpoint.weights.get(f"{path}.schedule")
    if schedule is not None and is_plain(schedule):
        now, last = (int(x) for x in schedule[:2])
        raise CheckpointError(
            f"{checkpoint.path}: {path} is still in its warm-up, at update {now} of {last}: it has "
            "no codes yet. Train on, take a later checkpoint, or lower --dpq-warmup-updates"
        )


def stored_form(checkpoint: Checkpoint, path: str, table: Table) -> Form:
    """A table of a compact checkpoint, as it is stored, on the checkpoint's own memory.

    `table` is of `checkpoint.record()`, so that its tensors are known to fit.
    """
    weights = checkpoint.weights
    part = {key[len(path) + 1 :]: weights[key] for key in keys_of(weights, [path])}
    form, settings = table.form_class()
    with naming(f"{checkpoint.path}: {path}"):
        return form.from_tensors(*table.size, settings, part)


def _check_finite(checkpoint: Checkpoint, key: str, tensor: Tensor) -> None:
    rows = tensor.reshape(-1, tensor.shape[-1])
    step = max(1, (_ROWS << 6) // max(rows.shape[1], 1))
    for start in range(0, rows.shape[0], step):
        # A sum is not finite if an element is not; the reverse needs a look at the elements.
        part = rows[start : start + step]
        if not bool(torch.isfinite(part.float().sum())):
            bad = int((~torch.isfinite(part)).sum())
            if bad:
                raise CheckpointError(
                    f"{checkpoint.path}: {key} holds NaN or infinite numbers ({bad:,} of them "
                    f"from row {start:,} on): this training has diverged"
                )


# Bytes --------------------------------------------------------------------------------------------


def _storage(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory behind a tensor."""
    untyped = getattr(tensor, "untyped_storage", None)
    if untyped is not None:
        storage = untyped()
        return storage.data_ptr(), storage.nbytes()
    typed = tensor.storage()  # torch 1
    return typed.data_ptr(), typed.nbytes()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of nested containers, which may contain themselves."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)


def stored_bytes(value: Any) -> int:
    """Bytes that the tensors of nested containers take in a file; shared memory counts once."""
    return sum(size for _, size in {_storage(tensor) for tensor in _tensors(value)})


def separate(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, each with no more memory behind it than is used; ties stay ties."""
    used: dict[tuple[int, int], int] = {}
    for tensor in weights.values():
        place = _storage(tensor)
        used[place] = max(used.get(place, 0), tensor.numel() * tensor.element_size())
    copies: dict[Any, Tensor] = {}
    out = {}
    for key, tensor in weights.items():
        place = _storage(tensor)
        if used[place] < place[1]:
            view = (place, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            if view not in copies:
                copies[view] = tensor.clone()
            tensor = copies[view]
        out[key] = tensor
    return out
