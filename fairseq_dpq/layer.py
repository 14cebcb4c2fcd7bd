"""DPQEmbedding, the training form: a drop-in for nn.Embedding that learns discrete codes. It keeps
what all methods share: query rows, padding, caches, statistics. The rest is the method's."""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_dpq.forms import first_form
from fairseq_dpq.forms.base import CompactRequest, Form
from fairseq_dpq.forms.packing import code_dtype
from fairseq_dpq.kept import Built, PendingRegularizers, TableCache
from fairseq_dpq.methods import DEFAULT_METHOD
from fairseq_dpq.methods.base import TableUse, checked_options
from fairseq_dpq.training.codebook import Codebook
from fairseq_dpq.training.codes import code_usage, joined
from fairseq_dpq.training.distances import float32_math
from fairseq_dpq.training.initialization import Trained, checked_padding, draw_like, real_rows
from fairseq_dpq.training.trackers import TrackerSet

_ROWS = 1 << 15  # vocabulary rows handled at once where the whole table is needed


class DPQEmbedding(nn.Module):
    """An embedding table whose rows are picked from a small value matrix by learned codes.

    Takes the first three arguments of `nn.Embedding`; the other keywords are the options of the
    method (docs/options.md). Files that they name are read now, unless `option_files` is False:
    a checkpoint that will be loaded has what was in them.

    `query` (n, d), `keys` and `values` (G, K, d / D) are trained; for VQ the values are the keys.
    With VQ, add `collect_regularizer(model)` to the loss of each batch.

    Statistics follow each forward pass in training, summed over all workers. With `defer_updates`
    they wait for `step()`, so that gradient accumulation gives what as many workers would.
    """

    query: Tensor
    values: Tensor
    keys: Tensor  # where the method has keys of its own

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        method: str = DEFAULT_METHOD,
        device: Any = None,
        dtype: torch.dtype | None = None,
        option_files: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.padding_idx = checked_padding(num_embeddings, padding_idx)
        self.ignored = self.padding_idx  # a token that lookups in training leave out
        self.config: Any = checked_options(method, options, TableUse(embedding_dim))
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.defer_updates = False
        # Lookups in training share the output's table, built once for both; their losses must then
        # be differentiated together, as fairseq does with each micro-batch.
        self.serves_output = False
        self.ignore_batch = False  # statistics skip the batches at hand (a worker's dummy batch)

        self.method = self.config.method
        shapes = self.method.shapes(self.config, num_embeddings, embedding_dim)
        constants = self.method.constants(self.config)
        for name, shape in shapes.items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            setattr(self, name, nn.Parameter(empty, requires_grad=name not in constants))
        self.trackers = TrackerSet(self.method.trackers(self.config, shapes))
        for tracker in self.trackers:
            for name, shape in tracker.buffers().items():
                # Counters too are float32: averages of checkpoints take no integers.
                self.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device=device))

        self.parts = tuple(shapes)  # names of the parameters
        self.regularizers = PendingRegularizers()
        # The whole table, until a tensor that it comes from changes
        self._kept = TableCache()
        self._frozen_codes: Tensor | None = None
        self.reset_parameters()
        if option_files:
            self.load_option_files()

    @torch.no_grad()
    def reset_parameters(self, like: Tensor | None = None, tied: bool = False) -> None:
        """Draw values from N(0, 1), as nn.Embedding does, or, given a table `like`, from that
        table's own initial values, whatever initialiser made them. The start of queries and keys
        is the method's; `tied` if an output layer shares the table."""
        parameters = dict(self.named_parameters())
        if like is not None:
            draw_like(parameters, like, self.ignored)
        else:
            for parameter in parameters.values():
                parameter.normal_()
        self.method.initialize(parameters, self.config, tied)
        if self.ignored is not None:
            self.query[self.ignored].zero_()
        self.reset_statistics()

    def load_option_files(self, path: str = "") -> None:
        """Read the files that options name, for the table at `path` of a model."""
        self.method.load_option_files(self.codebook(), self.config, path)

    @torch.no_grad()
    def reset_statistics(self, started: bool = False) -> None:
        """Forget running statistics, code use and collected tokens; EMA restarts at the values.

        `started` if a trained table has just set the codebook and the running statistics.
        """
        book = self.codebook()
        self.trackers.reset(book, started)
        if not started:
            self.method.first_statistics(book, self.config, real_rows(self.query, self.padding_idx))
        self._forget_tables()

    @torch.no_grad()
    def start_from_table(
        self, table: Tensor, *, seed: int = 0, progress: Callable[[int], None] | None = None
    ) -> None:
        """Set the layer so that its rows come near those of a trained table (n, d)."""
        trained = Trained(table, real_rows(table, self.padding_idx), seed, progress)
        self.method.start_from_table(self.codebook(), self.config, trained)
        self.reset_statistics(started=True)

    @classmethod
    def from_pretrained(
        cls,
        table: Tensor,
        padding_idx: int | None = None,
        *,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
        method: str = DEFAULT_METHOD,
        option_files: bool = True,
        path: str = "",
        **options: Any,
    ) -> DPQEmbedding:
        """A layer that starts near a trained table (n, d), by k-means of its product subspaces.

        `path` is its name in a full checkpoint that an option names.
        """
        if table.dim() != 2:
            raise ValueError(f"table has shape {tuple(table.shape)}; give (num_embeddings, d)")
        n, d = table.shape
        config = checked_options(method, options, TableUse(d, trained=True))
        how: dict[str, Any] = {"device": table.device, "dtype": table.dtype, **config.keywords()}
        layer = cls(n, d, padding_idx, option_files=False, **how)
        if option_files:  # first: the start follows the codes of a file
            layer.load_option_files(path)
        layer.start_from_table(table.detach().float(), seed=seed, progress=progress)
        return layer

    def codebook(self, tokens: Tensor | None = None) -> Codebook:
        """The tensors that codes come from; `tokens` are those of a batch."""
        # By name: replicas of DataParallel have tensors where others have parameters.
        own = {name: getattr(self, name) for name in (*self.parts, *self._buffers)}
        now, _, last = self.schedule_counts()
        return Codebook(own, tokens, ramp_left=last - now)

    def schedule_counts(self) -> tuple[int, int, int]:
        """Updates so far, last of the warm-up, last of the ramp; all 0 without a warm-up."""
        return self.trackers.counts(self._buffers)

    @property
    def is_plain(self) -> bool:
        """Whether the warm-up lasts: rows are the queries themselves, without codes."""
        now, plain, _ = self.schedule_counts()
        return now < plain

    def _is_frozen(self) -> bool:
        """Whether the user froze the table; averages and new seeds must not move it either."""
        return not self.query.requires_grad and "query" not in self.method.constants(self.config)

    def forward(self, indices: Tensor) -> Tensor:
        """Embeddings of any shape of int32 or int64 indices."""
        flat = indices.reshape(-1)
        position = None
        absent = self.ignored if self.training else self.padding_idx
        if absent is not None:
            position = (flat != absent).nonzero().squeeze(1)
            flat = flat.index_select(0, position)
        with float32_math(self.query.device):
            rows = F.embedding(flat, self.query, sparse=self.config.sparse)
            out = self._train(rows, flat) if self.training else self._evaluate(rows, flat)
        out = out.to(self.query.dtype)
        if position is not None and len(flat) < indices.numel():
            zeros = out.new_zeros(indices.numel(), self.embedding_dim)
            out = zeros.index_copy(0, position, out)
        return out.view(*indices.shape, self.embedding_dim)

    def _train(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Embeddings (tokens, d), the regulariser and what statistics will follow."""
        # A pass without gradients (MC dropout) is no step of the training.
        counts = torch.is_grad_enabled()
        if self.is_plain:
            book = self.codebook()
            first = book.keys.flatten()[0].float() + book.values.flatten()[0].float()
            out = rows + 0 * first  # DDP wants all gradients
            if counts and not self.defer_updates:
                self.step()
            return out
        one_table = self.serves_output and self.defer_updates and counts
        if one_table and self.method.trains_on_eval_codes(self.config):
            built = self._table()
            assert built.codes is not None
            codes = built.codes.index_select(0, tokens)
            seen = self.method.observe(rows, codes, self.codebook(), self.config)
            out = F.embedding(tokens, built.rows)
        else:
            seen = self.method.train(rows, self.codebook(tokens), self.config)
            out = self._ramped(rows, seen.rows)
        if not counts:
            return out
        if seen.regularizer is not None:
            self.regularizers.add(seen.regularizer)
        if not (self.ignore_batch or self._is_frozen()):
            self.trackers.collect(seen, tokens)
        if not self.defer_updates:
            self.step()
        return out

    def _ramped(self, rows: Tensor, quantized: Tensor) -> Tensor:
        """Between the plain rows and the quantised ones, while the ramp lasts in training."""
        now, first, last = self.schedule_counts()
        if not self.training or now >= last:
            return quantized
        return torch.lerp(rows.float(), quantized, max(0.0, (now - first) / (last - first)))

    def _evaluate(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Embeddings (tokens, d), codes by the running statistics."""
        if self.is_plain:
            return rows
        if self._frozen_codes is not None:
            codes = self._frozen_codes.index_select(0, tokens).long()
        else:
            codes = self.method.codes(rows, self.codebook(), self.config)
        return self.method.rebuild(rows, codes, self.codebook(), self.config)

    @property
    def weight(self) -> Tensor:
        """The reconstructed table (n, d), differentiable: what a tied output layer multiplies by.

        Codes come from the running statistics, in training too, so that the output layer sees
        the rows that evaluation will see. Without gradients it is kept until anything changes.
        """
        return self._table().rows

    def _table(self) -> Built:
        gradient = torch.is_grad_enabled()
        if not (self.serves_output and gradient if self.training else not gradient):
            return self._build_table()
        compare = not self.training and self._frozen_codes is None
        return self._kept.get([*self.parameters(), *self.buffers()], self._build_table, compare)

    def _build_table(self) -> Built:
        rows, codes = [], []
        book = self.codebook()
        with float32_math(self.query.device):
            for part in () if self.is_plain else self.query.split(_ROWS):
                codes.append(self.method.codes(part, book, self.config))
                built = self.method.rebuild(part, codes[-1], book, self.config)
                rows.append(self._ramped(part, built))
        table = joined(rows).to(self.query.dtype) if rows else self.query
        if self.padding_idx is not None:
            row = torch.tensor([self.padding_idx], device=table.device)
            table = table.index_fill(0, row, 0)
        return Built(table, joined(codes) if codes else None)

    @torch.no_grad()
    def codes(self, progress: Callable[[int], None] | None = None) -> Tensor:
        """Codes of the whole vocabulary, (n, D) in one or two bytes each, in bounded memory."""
        n, c = self.num_embeddings, self.config
        if not self.method.has_codes:
            raise ValueError(f"method {self.method.name} has no codes")
        if self.is_plain:
            now, last, _ = self.schedule_counts()
            raise RuntimeError(
                f"the table is still plain at update {now}: it gets its codes after {last} updates "
                "of warm-up"
            )
        codes = torch.empty(n, c.D, dtype=code_dtype(c.K), device=self.query.device)
        for rows, out in zip(self.query.split(_ROWS), codes.split(_ROWS)):
            out.copy_(self.method.codes(rows, self.codebook(), c))
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
    ) -> Form:
        """The inference form: codes and values, in `dtype` (default: as they are)."""
        self.regularizers.check_collected()
        codes = self.codes(progress) if self.method.has_codes else None
        learned = self.method.learned(self.codebook(), self.config, codes)
        size = self.embedding_dim, self.padding_idx
        request = CompactRequest(*size, dtype or self.values.dtype, packed)
        return first_form(self.method.forms).from_learned(learned, request)

    def freeze(self) -> None:
        """Work the codes out once for all evaluation until `train()` is called again."""
        self._frozen_codes = self.codes() if self.method.has_codes and not self.is_plain else None

    def compression_ratio(self) -> float:
        """Bits of the full float32 table over bits of codes and values, by the formula."""
        return self.config.compression_ratio(self.num_embeddings, self.embedding_dim)

    @torch.no_grad()
    def code_usage(self) -> dict[str, Tensor]:
        """Of the whole vocabulary, per group: `used`, codes in use, and `entropy`, in bits."""
        return code_usage(self.codes(), self.config.K, self.padding_idx)

    def step(self) -> bool:
        """Let statistics follow the forward passes since the last call, over all workers alike.

        Returns True if keys or values were set (end of the warm-up or of the ramp, re-seeding): an
        optimiser with copies of its own, as for fp16, must be told."""
        book, was_plain = self.codebook(), self.is_plain
        changed = self.trackers.apply(book, held=was_plain or self._is_frozen())
        if not was_plain or self.is_plain:
            return changed
        trained = Trained(self.query.float(), real_rows(self.query, self.padding_idx))
        self.method.start_from_table(book, self.config, trained)
        self.trackers.codes_were_reset(book, book.keys.new_ones(book.keys.shape[:2]).bool())
        return True

    def train(self, mode: bool = True) -> DPQEmbedding:
        if mode:
            self._forget_tables()
        if mode != self.training:
            self.regularizers.waiting.clear()
            self._kept.drop()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> DPQEmbedding:
        # Statistics stay float32 in a half-precision model: they move in steps too small for it.
        before: dict[str, Any] = dict(self._buffers)
        super()._apply(fn, *args, **kwargs)
        for name, after in self.named_buffers():
            if after.dtype != before[name].dtype:
                self._buffers[name] = before[name].to(after.device)
        for tracker in self.trackers:
            tracker.clear()
        self._forget_tables()
        return self

    def _forget_tables(self) -> None:
        self._frozen_codes = None
        self._kept.drop()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget_tables()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to one batch is neither copied nor pickled; autograd tensors could not be.
        state = self.__dict__.copy()
        state.update(trackers=copy.copy(self.trackers), regularizers=PendingRegularizers())
        state.update(_frozen_codes=None)
        return state

    def __prepare_scriptable__(self) -> Form:
        """TorchScript gets the inference form."""
        return self.compact()

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        words = [*self.config.sizes(), f"method={self.method.name}"]
        return f"{text}, {', '.join(words)}, CR={self.compression_ratio():.1f}"


def dpq_modules(module: nn.Module) -> Iterator[DPQEmbedding]:
    """The DPQ tables of a model, each once."""
    return (m for m in module.modules() if isinstance(m, DPQEmbedding))
