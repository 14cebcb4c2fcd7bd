"""What a method of learning codes has to provide, and what those that compare queries with keys
have in common. A method holds no tensors: it is given the table's codebook and options."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor

from fairseq_dpq import initialization
from fairseq_dpq.codebook import Codebook, Penalty, Step
from fairseq_dpq.codes import best_codes, evaluation_codes
from fairseq_dpq.distances import DISTANCES, Dot
from fairseq_dpq.forms.base import Wanted
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.initialization import Trained
from fairseq_dpq.normalization import Stats, batch_normalize, batch_statistics, normalize
from fairseq_dpq.statistics import (
    FirstTokens,
    IdleCodes,
    ResponseStatistics,
    Shapes,
    Tracker,
    WarmUp,
)

_FIRST_ROWS = 1 << 13  # enough of a random start to know its statistics
_SHORTEST = 8  # updates of a training that has room for a warm-up
START = 0.02  # deviation of queries and keys at the start
_SMALLEST, _LARGEST = 0.002, 0.06  # bounds of the same where it follows the table's own scale

Options = Any  # a DPQConfig; config.py imports the methods, so they cannot import it
Need = Callable[[bool, str, str], None]  # (holds, option, what would be right)
Say = Callable[[str, Any], str]  # (option, value) -> as the user knows it


def half_scale(drawn: Tensor) -> float:
    """Half the deviation of numbers that the table's own initialiser drew, within bounds."""
    if drawn.is_meta:
        return START
    return min(max(float(drawn.float().std(unbiased=False)) / 2, _SMALLEST), _LARGEST)


class Method:
    """How a table's rows are learned. What raises NotImplementedError here, a method provides."""

    name: str
    options: tuple[str, ...]  # the options that it takes
    switch = "K"  # the option that must be given, and turns the plugin on
    has_codes = True
    splits_rows = True  # whether D groups share the columns of a row among them
    regularized = False  # whether its loss has a term of its own
    collapse_hints: tuple[str, ...] = ()  # flags of its own that help when codes collapse

    def validate(self, c: Options, embedding_dim: int | None, need: Need, say: Say) -> None:
        """Check its own options; `need` raises the error, `say` names an option in its text."""

    def defaults(self, c: Options, tied: bool, max_update: int) -> dict[str, Any]:
        """Values of the options that the user may leave open (None)."""
        return {}

    def shapes(self, c: Options, num_embeddings: int, embedding_dim: int) -> Shapes:
        """Its parameters: `query` (rows, size) and `values`, then its own."""
        raise NotImplementedError

    def constants(self, c: Options) -> tuple[str, ...]:
        """Parameters that no gradient moves."""
        return ()

    def trackers(self, c: Options, shapes: Shapes) -> list[Tracker]:
        """What it follows during training."""
        return []

    def train(self, rows: Tensor, book: Codebook, c: Options) -> Step:
        """Embeddings of query rows (tokens, size) in training, with the method's gradient."""
        raise NotImplementedError

    def codes(self, rows: Tensor, book: Codebook, c: Options) -> Tensor:
        """The codes (tokens, D) of query rows in evaluation."""
        raise NotImplementedError

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: Options) -> Tensor:
        """Embeddings (tokens, d) of given codes, with the gradient where one is wanted."""
        raise NotImplementedError

    def shares_rows(self, c: Options) -> bool:
        """Whether training sees the rows that `rebuild` gives, so that one table can serve all
        lookups and the output layer of an update."""
        return False

    def observe(self, rows: Tensor, codes: Tensor, book: Codebook, c: Options) -> Step:
        """What statistics and the regulariser take from a batch whose codes are known."""
        raise NotImplementedError

    def initialize(self, parameters: dict[str, Tensor], c: Options, tied: bool) -> None:
        """Set the starting values that matter to learning; the others come from the table.
        `tied` if an output layer shares the table."""

    def is_fixed(self, book: Codebook, c: Options) -> bool:
        """Whether the user froze the table; averages and new seeds must not move it either."""
        return not book.query.requires_grad and "query" not in self.constants(c)

    def take_files(self, book: Codebook, c: Options, path: str) -> None:
        """Read the files that its options name into a new table, at `path` of its model."""

    def first_statistics(self, book: Codebook, c: Options, real: Tensor) -> None:
        """Set the running statistics for the first batch, which has none before it."""

    def start_from_plain(self, book: Codebook, c: Options, trained: Trained) -> None:
        """End of the warm-up: codes from queries, which are the rows of `trained`."""
        raise NotImplementedError

    def start(self, book: Codebook, c: Options, trained: Trained) -> None:
        """Begin at a trained table: at its rows themselves where a ramp leads away from them."""
        if c.warmup_updates and c.ramp_updates:
            book.query.copy_(trained.table)
            self.start_from_plain(book, c, trained)
        else:
            self.start_from_table(book, c, trained)

    def start_from_table(self, book: Codebook, c: Options, trained: Trained) -> None:
        """Set the codebook so that its rows come near a trained table (n, d)."""
        raise NotImplementedError

    def bits(self, c: Options, num_embeddings: int, embedding_dim: int) -> int:
        """Bits of the inference form by the paper's formula."""
        raise NotImplementedError

    def compact(self, book: Codebook, c: Options, codes: Tensor | None, wanted: Wanted) -> Any:
        """The inference form; `codes` (n, D) where it has any."""
        raise NotImplementedError

    def describe(self, c: Options) -> str:
        """The options that set its size, for logs and tables."""
        raise NotImplementedError

    def extra_repr(self, c: Options) -> str:
        """The same as keywords, for the layer's repr."""
        raise NotImplementedError


class ProductMethod(Method):
    """Rows put together from D parts, one of K values each: product codes."""

    def bits(self, c: Options, num_embeddings: int, embedding_dim: int) -> int:
        rows = c.K if c.share_subspaces else c.K * c.D
        codes = num_embeddings * c.D * (c.K - 1).bit_length()
        return codes + 32 * rows * (embedding_dim // c.D)

    def compact(
        self, book: Codebook, c: Options, codes: Tensor | None, wanted: Wanted
    ) -> CompactEmbedding:
        assert codes is not None
        values = book.values.detach().to(wanted.dtype or book.values.dtype, copy=True)
        size = wanted.embedding_dim, wanted.padding_idx
        return CompactEmbedding.from_codes(codes, values, *size, packed=wanted.packed)

    def describe(self, c: Options) -> str:
        shared = " shared" if c.share_subspaces else ""
        return f"{self.name} K={c.K} D={c.D}{shared}"

    def extra_repr(self, c: Options) -> str:
        shared = ", shared subspaces" if c.share_subspaces else ""
        return f"K={c.K}, D={c.D}, method={self.name}{shared}"


class KeyedMethod(ProductMethod):
    """Codes are the keys nearest to a query in each group: SX and VQ."""

    options: tuple[str, ...] = (
        "K",
        "D",
        "distance",
        "share_subspaces",
        "key_dim",
        "normalize",
        "batch_stats",
        "warmup_updates",
        "ramp_updates",
        "kmeans_init",
        "reseed_after",
    )
    default_distance: str

    def distance(self, c: Options) -> Dot:
        """The distance in force."""
        return DISTANCES[c.distance or self.default_distance]

    def shapes(self, c: Options, num_embeddings: int, embedding_dim: int) -> Shapes:
        groups = 1 if c.share_subspaces else c.D
        size = embedding_dim // c.D
        return {
            "query": (num_embeddings, c.D * (c.key_dim or size)),
            "values": (groups, c.K, size),
        }

    def defaults(self, c: Options, tied: bool, max_update: int) -> dict[str, Any]:
        # docs/quality.md has the study behind these numbers.
        plain = c.key_dim is None and not c.kmeans_init
        # A tied table has more to learn before its codes are worth anything.
        share = max_update // 4 if tied else max_update // 8
        warmup = share if plain and max_update >= _SHORTEST else 0
        if c.warmup_updates is not None:
            warmup = c.warmup_updates
        return {"warmup_updates": warmup, "ramp_updates": max_update // 2 if warmup else 0}

    def initialize(self, parameters: dict[str, Tensor], c: Options, tied: bool) -> None:
        """Small queries and keys.

        What a large random start adds to a row is noise to the codes: they would have to spell it
        out. And with keys of size m and numbers of deviation s the variance of a response is
        m s^4: far below the 1e-3 that normalisation adds, the softmax of SX starts flat, each code
        gets a gradient, and one step of Adam can still change a code.

        With a warm-up, codes come from k-means later. Then a table that would start smaller by
        itself does so here too, and a tied one starts larger: an output layer is slow to learn from
        rows near 0.
        """
        scale = START
        if c.warmup_updates:
            own = half_scale(parameters["query"])
            scale = own if tied else min(START, own)
        drawn = [parameters[name] for name in ("query", "keys") if name in parameters]
        self._draw(drawn, scale, c)

    def _draw(self, parameters: list[Tensor], scale: float, c: Options) -> None:
        """Draw from N(0, scale). With `batch_stats` a table trains as in the paper, where all of it
        starts like the rest of the model: what the table's initialiser drew stays, unless it is
        N(0, 1), nn.Embedding's own, from which codes hardly learn."""
        for parameter in parameters:
            if not c.batch_stats:
                parameter.normal_(0, scale)
            elif not parameter.is_meta and parameter.float().std(unbiased=False) > 0.5:
                parameter.mul_(scale)

    def trackers(self, c: Options, shapes: Shapes) -> list[Tracker]:
        groups, K, _ = shapes["values"]
        out: list[Tracker] = []
        if c.warmup_updates:
            out.append(WarmUp(c.warmup_updates, c.ramp_updates))
        if c.normalize:
            measure = None if c.batch_stats else partial(self._sample_statistics, c)
            out.append(ResponseStatistics(groups, K, measure))
        out += self._own_trackers(c, shapes)
        if c.kmeans_init:
            out.append(FirstTokens(shapes["query"][0], c.kmeans_init, c.D))
        if c.reseed_after:
            out.append(IdleCodes(groups, K, c.reseed_after, self.reseed))
        return out

    def _own_trackers(self, c: Options, shapes: Shapes) -> list[Tracker]:
        return []

    def reseed(self, book: Codebook, dead: Tensor, query: Tensor, codes: Tensor) -> None:
        """Put dead codes (G, K) on queries (rows, D, key size) of tokens that were just seen."""
        raise NotImplementedError

    def by_group(self, rows: Tensor, c: Options) -> Tensor:
        """Query rows in float32: (tokens, D, key size)."""
        return rows.float().view(rows.shape[0], c.D, rows.shape[1] // c.D)

    def shares_rows(self, c: Options) -> bool:
        # A table without a warm-up trains as version 0.1 did, to the bit.
        return bool(c.warmup_updates) and not c.batch_stats

    def train(self, rows: Tensor, book: Codebook, c: Options) -> Step:
        if not self.shares_rows(c):
            return self._train_by_responses(rows, book, c)
        # By the running statistics, as in evaluation: a table that is used in several places, each
        # with tokens of its own, would else give one token several codes.
        codes = self.codes(rows, book, c)
        out = self.rebuild(rows, codes, book, c)
        return self.observe(rows, codes, book, c)._replace(rows=out)

    def _train_by_responses(self, rows: Tensor, book: Codebook, c: Options) -> Step:
        """`train` with responses and codes by matrix products, as the paper has it."""
        raise NotImplementedError

    def observe(self, rows: Tensor, codes: Tensor, book: Codebook, c: Options) -> Step:
        q = self.by_group(rows, c)
        batch = None
        if book.stats is not None:
            with torch.no_grad():
                batch = batch_statistics(q, book.keys.float(), self.distance(c))
        return Step(rows, q.detach(), codes, batch, self._penalty(q, codes, book, c))

    def _penalty(self, q: Tensor, codes: Tensor, book: Codebook, c: Options) -> Penalty | None:
        """The regulariser of queries (tokens, D, size) with these codes."""
        return None

    def _assign(self, q: Tensor, keys: Tensor, book: Codebook, c: Options) -> tuple:
        """Responses (tokens, D, K), normalised; codes; this batch's statistics."""
        resp = self.distance(c).response(q, keys)
        batch = None
        if book.stats is not None:
            if resp.shape[0] * (resp.shape[1] if c.share_subspaces else 1) < 2:
                resp = normalize(resp, book.stats)
            elif c.batch_stats:
                resp, batch = batch_normalize(resp, c.share_subspaces)
            else:
                batch = batch_statistics(q.detach(), keys.detach(), self.distance(c))
                resp = normalize(resp, book.stats.clone())
        return resp, best_codes(resp.detach()), batch

    def codes(self, rows: Tensor, book: Codebook, c: Options) -> Tensor:
        q = self.by_group(rows.detach(), c)
        return evaluation_codes(q, book.keys.detach(), self.distance(c), book.stats)

    def _sample_statistics(self, c: Options, book: Codebook) -> Stats | None:
        """Of the responses to the keys as they are, from the first rows of the vocabulary."""
        q = self.by_group(book.query.detach()[:_FIRST_ROWS], c)
        return batch_statistics(q, book.keys.detach().float(), self.distance(c))

    def first_statistics(self, book: Codebook, c: Options, real: Tensor) -> None:
        if book.query.is_meta:
            return
        some = slice(0, _FIRST_ROWS)
        self._vocabulary_statistics(replace(book, query=book.query[some]), c, real[some])

    def _vocabulary_statistics(self, book: Codebook, c: Options, real: Tensor) -> None:
        initialization.vocabulary_statistics(book, c.D, self.distance(c), real)

    def _table_codes(self, book: Codebook, c: Options) -> Tensor:
        return initialization.table_codes(book, c.D, self.distance(c))
