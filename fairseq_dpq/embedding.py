"""DPQEmbedding, the training form: a drop-in for nn.Embedding that learns discrete codes.

tokens -> query -> response -> codes -> values; see quantizer.py for the arithmetic.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, ContextManager, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_dpq import quantizer, starts
from fairseq_dpq.compact import CompactEmbedding
from fairseq_dpq.config import DPQConfig
from fairseq_dpq.packing import code_dtype
from fairseq_dpq.pending import Pending
from fairseq_dpq.quantizer import Stats

_STATS_RATE = 0.01  # of a new batch in the running statistics, once 100 batches have been averaged
_UNCOLLECTED = 64  # forward passes whose regulariser may wait to be collected
_ROWS = 1 << 15  # vocabulary rows handled at once where the whole table is needed


class DPQEmbedding(nn.Module):
    """An embedding table whose rows are picked from a small value matrix by learned codes.

    Takes the first three arguments of `nn.Embedding`; the keywords are the fields of `DPQConfig`.

    `query` (n, D * d_key), `keys` (G, K, d_key) and `values` (G, K, d / D) are trained; for VQ
    `keys` are the values. With VQ, add `collect_regularizer(model)` to the loss of each batch.

    Statistics (running mean and variance of the responses, EMA centroids, code use) follow each
    forward pass in training, summed over all workers of the default process group. With
    `defer_updates` they wait for `step()`, so that gradient accumulation over several
    micro-batches gives what as many workers would.
    """

    norm_mean: Tensor  # (G, K) running statistics of the responses, with `normalize`
    norm_var: Tensor
    norm_updates: Tensor
    ema_count: Tensor  # (G, K) and (G, K, d/D), with `ema_decay`
    ema_sum: Tensor
    idle: Tensor  # (G, K) updates since a code was last used, with `reseed_after`
    start_counts: Tensor  # (n,) tokens seen, with `kmeans_init`
    start_updates: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_embeddings < 1:
            raise ValueError(f"num_embeddings={num_embeddings}: must be 1 or more")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx={padding_idx}: must be within the {num_embeddings} rows of the "
                f"table, from {-num_embeddings} to {num_embeddings - 1}"
            )
        self.config = DPQConfig(**options)
        self.config.validate(embedding_dim)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.defer_updates = False
        self.ignore_batch = False  # statistics skip the batches at hand (a worker's dummy batch)

        c = self.config
        groups = 1 if c.share_subspaces else c.D
        key_dim = c.resolved_key_dim(embedding_dim)
        value_dim = embedding_dim // c.D
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Parameter(torch.empty(num_embeddings, c.D * key_dim, **make))
        self.values = nn.Parameter(
            torch.empty(groups, c.K, value_dim, **make), requires_grad=not c.ema_decay
        )
        if c.method == "sx":
            self.keys = nn.Parameter(torch.empty(groups, c.K, key_dim, **make))

        # Counters are float32 too: weight averaging (EMA, averaged checkpoints) takes no integers.
        def buffer(name: str, *shape: int) -> None:
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device=device))

        if c.normalize:
            buffer("norm_mean", groups, c.K)
            buffer("norm_var", groups, c.K)
            buffer("norm_updates")
        if c.ema_decay:
            buffer("ema_count", groups, c.K)
            buffer("ema_sum", groups, c.K, value_dim)
        if c.reseed_after:
            buffer("idle", groups, c.K)
        if c.kmeans_init:
            buffer("start_counts", num_embeddings)
            buffer("start_updates")

        self._pending = Pending()
        self._regularizer: list[tuple[Tensor, Tensor, int]] = []
        self._warned = False
        self._table_cache: tuple[Any, Tensor] | None = None
        self._frozen_codes: Tensor | None = None
        self.reset_parameters()

    # Starting values ------------------------------------------------------------------------

    def reset_parameters(self, like: Tensor | None = None) -> None:
        """Draw queries, keys and values from N(0, 1), as nn.Embedding does, or, given a table
        `like`, from that table's own initial values, whatever initialiser made them."""
        with torch.no_grad():
            if like is None:
                for parameter in self.parameters():
                    parameter.normal_()
            else:
                starts.draw_like(self, like)
            if self.padding_idx is not None:
                self.query[self.padding_idx].zero_()
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Forget running statistics, code use and collected tokens; EMA restarts at the values."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1 if name in ("norm_var", "ema_count") else 0)
        if self.config.ema_decay:
            self.ema_sum.copy_(self.values.detach())
        self._pending = Pending()
        self._table_cache = None

    @classmethod
    def from_pretrained(
        cls,
        table: Tensor,
        padding_idx: int | None = None,
        *,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> DPQEmbedding:
        """A layer that starts near a trained table (n, d), by k-means of its product subspaces."""
        if table.dim() != 2:
            raise ValueError(f"table has shape {tuple(table.shape)}; give (num_embeddings, d)")
        n, d = table.shape
        layer = cls(n, d, padding_idx, device=table.device, dtype=table.dtype, **options)
        starts.start_from_table(layer, table.detach().float(), seed=seed, progress=progress)
        return layer

    # The parts --------------------------------------------------------------------------------

    @property
    def keys_or_values(self) -> Tensor:
        """The keys: SX has its own, VQ's are the values."""
        return self.keys if self.config.method == "sx" else self.values

    def statistics(self) -> Stats | None:
        """The running statistics that normalise responses in evaluation."""
        return Stats(self.norm_mean, self.norm_var) if self.config.normalize else None

    def _books(self) -> tuple[Tensor, Tensor]:
        """Keys and values in float32, for a forward pass."""
        c = self.config
        keys, values = self.keys_or_values.float(), self.values.float()
        if c.method == "sx" and (c.kmeans_init or c.reseed_after):
            # These may set parameters before the backward pass; its gradient is the old ones'.
            keys, values = keys.clone(), values.clone()
        return keys, values

    def _groups_of(self, rows: Tensor) -> Tensor:
        """Query rows (tokens, D * d_key) in float32, by group: (tokens, D, d_key)."""
        return rows.float().view(rows.shape[0], self.config.D, rows.shape[1] // self.config.D)

    # Forward ----------------------------------------------------------------------------------

    def forward(self, indices: Tensor) -> Tensor:
        """Embeddings of any shape of int32 or int64 indices."""
        flat = indices.reshape(-1)
        position = None
        if self.padding_idx is not None:
            real = flat != self.padding_idx
            position = real.nonzero().squeeze(1)
            if position.numel() == flat.numel():
                position = None
            else:
                flat = flat.index_select(0, position)
        with _float32(self.query.device):
            rows = F.embedding(flat, self.query, sparse=self.config.sparse)
            if not self.training:
                out = self._evaluate(rows, flat)
            else:
                out = self._embed(self._groups_of(rows))
                if self.config.kmeans_init and not self.ignore_batch:
                    self._pending.add_tokens(self, flat)
                if not self.defer_updates:
                    self.step()
        out = out.reshape(flat.numel(), self.embedding_dim).to(self.query.dtype)
        if position is not None:
            zeros = out.new_zeros(indices.numel(), self.embedding_dim)
            out = zeros.index_copy(0, position, out)
        return out.view(*indices.shape, self.embedding_dim)

    def _embed(self, q: Tensor) -> Tensor:
        """Training: batch statistics, soft gradients, the regulariser; (tokens, D, d/D)."""
        c = self.config
        keys, values = self._books()
        soft = c.method == "sx"
        with torch.set_grad_enabled(soft and torch.is_grad_enabled()):
            resp = quantizer.response(q, keys, c.resolved_distance())
            stats = self.statistics()
            if stats is not None:
                if resp.shape[0] * (resp.shape[1] if c.share_subspaces else 1) > 1:
                    count = resp.shape[0]
                    resp, batch = quantizer.batch_normalize(resp, c.share_subspaces)
                    if not self.ignore_batch:
                        self._pending.add_stats(batch, count)
                else:  # one value has no spread to normalise by
                    resp = quantizer.normalize(resp, stats)
            codes = quantizer.best_codes(resp.detach())
        if (c.ema_decay or c.reseed_after) and not self.ignore_batch:
            self._pending.add_codes(self, q.detach(), codes)
        if soft:
            return quantizer.exchange(resp, values, codes, c.tau)
        centroid = quantizer.look_up(values, codes)
        if torch.is_grad_enabled() and q.shape[0]:
            self._add_regularizer(q, centroid)
        return quantizer.straight_through(q, centroid, values, c.rotation_trick)

    def _evaluate(self, rows: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Evaluation: codes by the running statistics; (tokens, D, d/D)."""
        q = self._groups_of(rows)
        if self._frozen_codes is not None and tokens is not None:
            return self._hard(
                q, self._frozen_codes.index_select(0, tokens).long(), self.statistics()
            )
        return self._hard(q, self._codes_of(q.detach()), self.statistics())

    def _codes_of(self, q: Tensor) -> Tensor:
        keys = self.keys_or_values.detach()
        distance = self.config.resolved_distance()
        return quantizer.evaluation_codes(q, keys, distance, self.statistics())

    def _hard(self, q: Tensor, codes: Tensor, stats: Stats | None) -> Tensor:
        """Value rows of given codes, with the method's gradient where one is wanted."""
        c = self.config
        keys, values = self._books()
        if torch.is_grad_enabled() and c.method == "sx":
            distance = c.resolved_distance()
            return quantizer.exchange_many(q, keys, values, codes, stats, distance, c.tau)
        centroid = quantizer.look_up(values, codes)
        if not torch.is_grad_enabled():
            return centroid
        return quantizer.straight_through(q, centroid, values, c.rotation_trick)

    # The whole table --------------------------------------------------------------------------

    @property
    def weight(self) -> Tensor:
        """The reconstructed table (n, d), differentiable: what a tied output layer multiplies by.

        Codes come from the running statistics, in training too, so that the output layer sees
        the rows that evaluation will see. Without gradients it is kept until anything changes.
        """
        if torch.is_grad_enabled():
            return self._build_table()
        state = tuple((t.data_ptr(), t._version) for t in [*self.parameters(), *self.buffers()])
        if self.training or self._table_cache is None or self._table_cache[0] != state:
            table = self._build_table()
            if self.training:
                return table
            self._table_cache = (state, table)
        return self._table_cache[1]

    def _build_table(self) -> Tensor:
        parts = []
        stats = self.statistics()
        if stats is not None:  # they may move before the backward pass
            stats = Stats(stats.mean.clone(), stats.var.clone())
        with _float32(self.query.device):
            for rows in self.query.split(_ROWS):
                q = self._groups_of(rows)
                part = self._hard(q, self._codes_of(q.detach()), stats)
                parts.append(part.reshape(rows.shape[0], -1))
        table = torch.cat(parts).to(self.query.dtype)
        if self.padding_idx is not None:
            row = torch.tensor([self.padding_idx], device=table.device)
            table = table.index_fill(0, row, 0)
        return table

    @torch.no_grad()
    def codes(self, progress: Callable[[int], None] | None = None) -> Tensor:
        """Codes of the whole vocabulary, (n, D) in one or two bytes each, in bounded memory."""
        n, c = self.num_embeddings, self.config
        codes = torch.empty(n, c.D, dtype=code_dtype(c.K), device=self.query.device)
        for start in range(0, n, _ROWS):
            rows = self.query[start : start + _ROWS]
            codes[start : start + _ROWS] = self._codes_of(self._groups_of(rows)).to(codes.dtype)
            if progress is not None:
                progress(rows.shape[0])
        if self.padding_idx is not None:
            codes[self.padding_idx] = 0
        return codes

    @torch.no_grad()
    def compact(
        self,
        *,
        packed: bool = False,
        dtype: torch.dtype | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> CompactEmbedding:
        """The inference form: codes and values, in `dtype` (default: as they are)."""
        return CompactEmbedding.from_codes(
            self.codes(progress),
            self.values.detach().to(dtype or self.values.dtype, copy=True),
            self.embedding_dim,
            self.padding_idx,
            packed=packed,
        )

    def freeze(self) -> None:
        """Work the codes out once for all evaluation until `train()` is called again."""
        self._frozen_codes = self.codes()

    def compression_ratio(self) -> float:
        """Bits of the full float32 table over bits of codes and values, by the formula."""
        return self.config.compression_ratio(self.num_embeddings, self.embedding_dim)

    @torch.no_grad()
    def code_usage(self) -> dict[str, Tensor]:
        """Of the whole vocabulary, per group: `used`, codes in use, and `entropy`, in bits."""
        return code_usage(self.codes(), self.config.K, self.padding_idx)

    # Regulariser and statistics -----------------------------------------------------------------

    def _add_regularizer(self, q: Tensor, centroid: Tensor) -> None:
        c = self.config
        total = q.new_zeros(())
        error = (centroid - q.detach()).pow(2).sum()
        if not c.ema_decay:  # with weight 0 too: DDP wants a gradient, if a zero, of each parameter
            total = total + c.reg_weight * error
        if c.commitment:
            total = total + c.commitment * (centroid.detach() - q).pow(2).sum()
        if len(self._regularizer) >= _UNCOLLECTED:
            if not self._warned:
                warnings.warn(
                    "the VQ regulariser of a DPQEmbedding was not collected for "
                    f"{_UNCOLLECTED} forward passes: its centroids are not trained. Add "
                    "collect_regularizer(model) to the loss of each batch.",
                    stacklevel=3,
                )
                self._warned = True
            self._regularizer.clear()
        self._regularizer.append((total, error.detach(), q.shape[0] * self.embedding_dim))

    def has_regularizer(self) -> bool:
        """Whether a regulariser waits to be collected."""
        return bool(self._regularizer)

    def pop_regularizer(self) -> Tensor | None:
        """The weighted regulariser of the forward passes since the last call: a mean over their
        tokens and dimensions; None without any (SX, evaluation)."""
        popped = self.pop_regularizer_and_error()
        return None if popped is None else popped[0]

    def pop_regularizer_and_error(self) -> tuple[Tensor, Tensor] | None:
        """The same, and the mean squared quantisation error without its weights, for a log."""
        waiting, self._regularizer = self._regularizer, []
        if not waiting:
            return None
        totals, errors, counts = zip(*waiting)
        return torch.stack(totals).sum() / sum(counts), torch.stack(errors).sum() / sum(counts)

    def step(self) -> bool:
        """Let statistics follow the forward passes since the last call, over all workers alike.

        Returns True if a parameter was set anew (k-means start, re-seeding), which an optimiser
        with copies of its own, as for fp16, must be told.
        """
        pending, self._pending = self._pending, Pending()
        return pending.apply(self, _STATS_RATE)

    # nn.Module --------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> DPQEmbedding:
        if mode:
            self._table_cache = self._frozen_codes = None
        if mode != self.training:  # what a batch left uncollected is not the next one's
            self._regularizer = []
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> DPQEmbedding:
        # Statistics stay float32 in a half-precision model: they move in steps too small for it.
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, *args, **kwargs)
        for name, before in kept.items():
            after = self._buffers[name]
            assert after is not None
            if after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        self._pending = Pending()
        self._table_cache = self._frozen_codes = None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._table_cache = self._frozen_codes = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to one batch is neither copied nor pickled; autograd tensors could not be.
        state = self.__dict__.copy()
        state.update(_pending=Pending(), _regularizer=[], _table_cache=None, _frozen_codes=None)
        return state

    def __prepare_scriptable__(self) -> CompactEmbedding:
        """TorchScript gets the inference form."""
        return self.compact()

    def extra_repr(self) -> str:
        c = self.config
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        text += f", K={c.K}, D={c.D}, method={c.method}"
        if c.share_subspaces:
            text += ", shared subspaces"
        return f"{text}, CR={self.compression_ratio():.1f}"


def dpq_modules(module: nn.Module) -> Iterator[DPQEmbedding]:
    """The DPQ tables of a model, each once."""
    return (m for m in module.modules() if isinstance(m, DPQEmbedding))


def collect_regularizer(module: nn.Module) -> Tensor:
    """The regularisers of all DPQ tables since the last call, summed; add it to the batch loss."""
    terms = [
        term for term in (m.pop_regularizer() for m in dpq_modules(module)) if term is not None
    ]
    if not terms:
        first = next(module.parameters(), None)
        return torch.zeros((), device=None if first is None else first.device)
    return torch.stack(terms).sum()


def code_usage(codes: Tensor, K: int, padding_idx: int | None = None) -> dict[str, Tensor]:
    """Per group of codes (n, D): `used` codes and their `entropy` in bits, padding left out."""
    n, D = codes.shape
    counts = torch.zeros(D * K, dtype=torch.int64, device=codes.device)
    offset = torch.arange(D, device=codes.device) * K
    for start in range(0, n, _ROWS):
        index = (codes[start : start + _ROWS].long() + offset).reshape(-1)
        counts += torch.bincount(index, minlength=D * K)
    counts = counts.view(D, K)
    if padding_idx is not None:
        counts[torch.arange(D, device=codes.device), codes[padding_idx].long()] -= 1
    p = counts.double() / counts.sum(1, keepdim=True).clamp_min(1)
    entropy = -(p * p.clamp_min(1e-300).log2()).sum(1)
    return {"used": (counts > 0).sum(1), "entropy": entropy.float()}


def _float32(device: torch.device) -> ContextManager[Any]:
    """Switch autocast off: responses and codes are float32 whatever the model runs in."""
    if device.type in ("cpu", "cuda"):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
