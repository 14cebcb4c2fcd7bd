"""What a checkpoint holds: its model config, its DPQ tables in either form, bytes of its parts."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Hashable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fairseq_dpq.fairseq_plugin.configs import get_option, read_record
from fairseq_dpq.fairseq_plugin.validation import check_record
from fairseq_dpq.files.errors import CheckpointError, naming
from fairseq_dpq.files.loading import load_checkpoint
from fairseq_dpq.files.memory import identity
from fairseq_dpq.files.progress import bar
from fairseq_dpq.files.record import TablesRecord
from fairseq_dpq.forms.base import Form
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.training.trackers import is_plain

_NUMBERS = 1 << 22  # looked at together


@dataclass
class Checkpoint:
    """A loaded file."""

    path: Path
    state: dict[str, Any]
    file_bytes: int

    @classmethod
    def load(cls, path: str | Path, trust: bool = False) -> Checkpoint:
        state = load_checkpoint(path, trust)
        return cls(Path(path), state, os.path.getsize(path))

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.state["model"]

    def with_weights(self, weights: dict[str, Tensor]) -> Checkpoint:
        """The same checkpoint with another state_dict."""
        return replace(self, state={**self.state, "model": weights})

    @property
    def model_cfg(self) -> Any:
        """The model's config: a Namespace, a dict or a DictConfig."""
        cfg = self.state.get("cfg")
        if not cfg:
            return self.state["args"]  # of fairseq 0.9 and before
        model = get_option(cfg, "model") if isinstance(cfg, Mapping) else None
        if not isinstance(model, (Namespace, Mapping)):
            raise CheckpointError(f"{self.path} is not a fairseq checkpoint: its cfg has no model")
        return model

    @cached_property
    def record(self) -> TablesRecord | None:
        """The record of its DPQ tables, which fits its tensors; None for a model without any."""
        with naming(self.path):
            record = read_record(self.model_cfg)
            if record is not None:
                check_record(record, self.weights)
            return record

    def dpq_record(self) -> TablesRecord:
        """The record of its DPQ tables; a model without any is an error."""
        if self.record is None or not self.record.tables:
            raise CheckpointError(
                f"{self.path} has no DPQ table: it was trained without --dpq-K; "
                "fairseq-dpq-quantize makes a compact model of it"
            )
        return self.record

    def table_bytes(self, path: str) -> int:
        """Bytes of the tensors of one table."""
        return stored_bytes([self.weights[key] for key in keys_of(self.weights, [path])])

    def other_bytes(self) -> int:
        """Bytes of the model without its DPQ tables."""
        tables = set(keys_of(self.weights, self.record.names() if self.record else ()))
        return stored_bytes([t for key, t in self.weights.items() if key not in tables])

    def optimizer_bytes(self) -> int:
        return stored_bytes(self.state.get("last_optimizer_state"))

    def form(self, path: str, dtype: torch.dtype | None = None) -> Form:
        """A DPQ table in the form that inference uses; a compact one on the file's own memory."""
        record = self.dpq_record()
        table = record.tables[path]
        if record.stage != "compact":
            with bar(path, table.num_embeddings) as done:
                how: Any = {"dtype": dtype or torch.float32, "progress": done.update}
                return self.layer(path).compact(packed=True, **how)
        weights = self.weights
        own = {key[len(path) + 1 :]: weights[key] for key in keys_of(weights, [path])}
        cls, settings = table.form_class()
        with naming(f"{self.path}: {path}"):
            form = cls.from_tensors(*table.size, settings, own)
        return form if dtype is None else form.to(dtype)

    def layer(self, path: str) -> DPQEmbedding:
        """A table in its training form, for evaluation, on the checkpoint's own memory."""
        table = self.dpq_record().tables[path]
        self.check_warmed_up(path)
        # One row: a layer of n would draw n random rows first.
        layer = DPQEmbedding(1, table.embedding_dim, option_files=False, **table.options)
        buffers = [name for tracker in layer.trackers for name in tracker.evaluated]
        for name in (*layer.parts, *buffers):
            key = f"{path}.{name}"
            tensor = self.weights.get(key)
            if tensor is None:
                raise CheckpointError(f"{self.path} has no {key}; its record names the table")
            self._check_finite(key, tensor)
            if name in layer._parameters:
                layer._parameters[name] = nn.Parameter(tensor.detach(), requires_grad=False)
            else:
                layer._buffers[name] = tensor
        n, pad = table.num_embeddings, table.padding_idx
        layer.num_embeddings, layer.padding_idx = n, None if pad is None else pad % n
        return layer.eval()

    def check_warmed_up(self, path: str) -> None:
        """Raise for a table that has no codes yet."""
        schedule = self.weights.get(f"{path}.schedule")
        if schedule is not None and is_plain(schedule):
            now, last = (int(x) for x in schedule[:2])
            raise CheckpointError(
                f"{self.path}: {path} is still in its warm-up, at update {now} of {last}: it has "
                "no codes yet. Train on, take a later checkpoint, or lower --dpq-warmup-updates"
            )

    def _check_finite(self, key: str, tensor: Tensor) -> None:
        for part in tensor.reshape(-1).split(_NUMBERS):
            # A sum is not finite if an element is not; the reverse needs a look at the elements.
            if torch.isfinite(part.float().sum()) or torch.isfinite(part).all():
                continue
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"{self.path}: {key} holds NaN or infinite numbers ({bad:,} of them): this "
                "training has diverged"
            )


def keys_of(weights: Mapping[str, Tensor], paths: Iterable[str]) -> list[str]:
    """The keys of a state_dict that belong to these modules."""
    inside = tuple(f"{path}." for path in paths)
    return [key for key in weights if inside and key.startswith(inside)]


# Bytes --------------------------------------------------------------------------------------------


def _storage(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory behind a tensor."""
    untyped = getattr(tensor, "untyped_storage", tensor.storage)  # torch 1 has the other alone
    storage = untyped()
    return storage.data_ptr(), storage.nbytes()


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


def each_once(
    weights: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """A state_dict with every tensor changed; names that share a tensor share the new one."""
    done: dict[Hashable, Tensor] = {}
    out = {}
    for key, tensor in weights.items():
        place = identity(tensor)
        if place not in done:
            done[place] = change(key, tensor)
        out[key] = done[place]
    return out


def separate(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, each with no more memory behind it than is used; ties stay ties."""
    used: dict[tuple[int, int], int] = {}
    for tensor in weights.values():
        place = _storage(tensor)
        used[place] = max(used.get(place, 0), tensor.numel() * tensor.element_size())

    def own(key: str, tensor: Tensor) -> Tensor:
        place = _storage(tensor)
        return tensor.clone() if used[place] < place[1] else tensor

    return each_once(weights, own)
