"""DPQ-SX: the hard value row forward, the gradient of a softmax over the keys backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_dpq import initialization, native
from fairseq_dpq.averages import KeyAverage
from fairseq_dpq.codebook import Codebook, Step
from fairseq_dpq.codes import by_group, chunks, look_up, sum_by_code, value_rows
from fairseq_dpq.distances import Dot
from fairseq_dpq.initialization import Trained
from fairseq_dpq.kmeans import means
from fairseq_dpq.methods.base import KeyedMethod, Need, Options, Say
from fairseq_dpq.normalization import Stats
from fairseq_dpq.statistics import Shapes, Tracker

_DECAY = 0.9  # of the average that keys follow


class SX(KeyedMethod):
    """Softmax-based: separate keys and values; any distance, any key size."""

    name = "sx"
    options = (*KeyedMethod.options, "tau")
    default_distance = "dot"

    def validate(self, c: Options, embedding_dim: int | None, need: Need, say: Say) -> None:
        need(c.tau is None or c.tau > 0, "tau", "must be above 0; try 1.0")
        plain = c.key_dim is None or embedding_dim is None or c.key_dim == embedding_dim // c.D
        need(
            plain or not c.warmup_updates,
            "key_dim",
            "queries are the rows of a plain table during a warm-up; leave it out, or use "
            + say("warmup_updates", 0),
        )

    def defaults(self, c: Options, tied: bool, max_update: int) -> dict[str, Any]:
        own = super().defaults(c, tied, max_update)
        warm = bool(own["warmup_updates"])
        asked = c.batch_stats or c.normalize or c.distance not in (None, "euclidean")
        if warm and not asked:
            # k-means gave the codes, by the nearest centroid: the same rule keeps them.
            return {**own, "tau": 0.05, "normalize": False, "distance": "euclidean"}
        # From a random start, a soft gradient finds better codes; after a warm-up there are good
        # ones already, and a harder one is nearer to the truth.
        return {**own, "tau": 0.25 if warm else 1.0, "normalize": True}

    def _by_nearness(self, c: Options) -> bool:
        """Whether the nearest key gives the code, as k-means does at the end of the warm-up."""
        nearest = not c.normalize and self.distance(c).name == "euclidean"
        return nearest and bool(c.warmup_updates)

    def constants(self, c: Options) -> tuple[str, ...]:
        return ("keys",) if self._by_nearness(c) else ()

    def _own_trackers(self, c: Options, shapes: Shapes) -> list[Tracker]:
        groups, K, size = shapes["values"]
        return [KeyAverage(groups, K, size, _DECAY)] if self._by_nearness(c) else []

    def shapes(self, c: Options, num_embeddings: int, embedding_dim: int) -> Shapes:
        shapes = super().shapes(c, num_embeddings, embedding_dim)
        groups, K, size = shapes["values"]
        return {**shapes, "keys": (groups, K, c.key_dim or size)}

    def _train_by_responses(self, rows: Tensor, book: Codebook, c: Options) -> Step:
        q = self.by_group(rows, c)
        keys, values = book.float(copy=_may_be_set(c))
        resp, codes, batch = self._assign(q, keys, book, c)
        out = exchange(resp, values, codes, c.tau)
        return Step(out.flatten(1), q.detach(), codes, batch)

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: Options) -> Tensor:
        keys, values = book.float(copy=_may_be_set(c))
        if torch.is_grad_enabled():
            q = self.by_group(rows, c)
            tau = c.tau * _spread(keys) if self._by_nearness(c) else c.tau
            how = self.distance(c), tau, self.shares_rows(c)
            out = exchange_many(q, keys, values, codes, book.stats, *how)
        else:
            out = look_up(values, codes)
        return out.flatten(1)

    def reseed(self, book: Codebook, dead: Tensor, query: Tensor, codes: Tensor) -> None:
        group, code, row, source = initialization.reseed_keys(book, dead, query)
        # The value of the token's present code: its embedding does not jump when it changes.
        book.values[group, code] = book.values[group, codes[row, source]]

    def start_from_table(self, book: Codebook, c: Options, trained: Trained) -> None:
        groups, K, size = book.values.shape
        found = initialization.cluster_table(trained, groups, K, c.D)
        book.values.copy_(found.centroids)
        same_space = self.distance(c).name == "euclidean" and c.key_dim in (None, size)
        if same_space and (not c.normalize or size == 1):
            book.query.copy_(trained.table)
            book.keys.copy_(found.centroids)
        else:  # a query may be anything that gives the right code
            keys = _spread_keys(book.keys, found.centroids, found.mass, c.normalize, trained.seed)
            book.keys.copy_(keys)
            initialization.pull_queries(book, book.keys, found.codes, 1.0)
        self._vocabulary_statistics(book, c, trained.real)
        # The best values for the codes that the table really gets.
        codes = initialization.grouped_codes(self._table_codes(book, c), groups, found.rows)
        best, mass = means(found.points, codes, K)
        book.values.copy_(torch.where((mass > 0).unsqueeze(-1), best, found.centroids))

    @torch.no_grad()
    def start_from_plain(self, book: Codebook, c: Options, trained: Trained) -> None:
        groups, K, _ = book.values.shape
        found = initialization.cluster_table(trained, groups, K, c.D)
        # Normalised dot products do not see the mean of the queries.
        shift = self.distance(c).name != "euclidean"
        mean = found.points.mean(1, keepdim=True) if shift else 0
        book.keys.copy_(found.centroids - mean)
        self._vocabulary_statistics(book, c, trained.real)
        codes = initialization.grouped_codes(self._table_codes(book, c), groups, found.rows)
        best, mass = means(found.points, codes, K)
        book.values.copy_(torch.where((mass > 0).unsqueeze(-1), best, found.centroids))


def _spread(keys: Tensor) -> Tensor:
    """The mean squared distance of the keys of a group from their middle, (G, 1): a temperature in
    this unit means the same whatever the scale of the table is."""
    offset = keys.detach() - keys.detach().mean(1, keepdim=True)
    return offset.pow(2).sum(-1).mean(1, keepdim=True).clamp_min(1e-12)


def _may_be_set(c: Options) -> bool:
    """Whether an update may set keys and values before the backward pass has read them."""
    return bool(c.kmeans_init or c.reseed_after or c.warmup_updates)


def _spread_keys(
    like: Tensor, centroids: Tensor, mass: Tensor, normalized: bool, seed: int
) -> Tensor:
    """Unit keys, each nearest to itself by any distance, also when normalised.

    Normalised responses are <q - mean, k> over the deviation of <q, k>. The queries are the keys,
    in the numbers `mass` (G, K). Where they have mean 0 and equal variance in all directions,
    that is the cosine, which no key but k itself maximises.
    """
    G, K, size = like.shape
    if size == centroids.shape[-1]:
        keys = centroids - centroids.mean(1, keepdim=True)
    else:
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(G, K, size, generator=generator).to(like.device)
    keys = F.normalize(keys, dim=-1)
    if not normalized or size == 1:  # on a line there are two directions only
        return keys
    share = (mass / mass.sum(1, keepdim=True).clamp_min(1)).unsqueeze(-1)
    for _ in range(20):
        keys = keys - (share * keys).sum(1, keepdim=True)
        spread, axes = torch.linalg.eigh((share * keys).transpose(1, 2) @ keys)  # (G, size)
        scale = 1 / (spread + 1e-2 * spread.amax(1, keepdim=True)).clamp_min(1e-12).sqrt()
        keys = F.normalize((keys @ axes * scale.unsqueeze(1)) @ axes.transpose(1, 2), dim=-1)
    return keys


# Gradients ----------------------------------------------------------------------------------------


def exchange(resp: Tensor, values: Tensor, codes: Tensor, tau: float) -> Tensor:
    """The value rows of given codes (tokens, D, d/D), with the softmax's gradient."""
    return _by_token(_SoftmaxExchange.apply(resp, values, codes, tau), codes)


def exchange_many(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    codes: Tensor,
    stats: Stats | None,
    distance: Dot,
    tau: float | Tensor,
    by_library: bool = False,
) -> Tensor:
    """`exchange` of as many rows as a vocabulary has, by given statistics, in little memory. `tau`
    may be one for each group, (G, 1).

    `by_library`: by the native library where it can, which rounds otherwise.
    """
    if not by_library or not native.takes_gradients(query, keys, values):
        rows = _Recomputed.apply(query, keys, values, codes, stats, distance, tau)
        return _by_token(rows, codes)
    relative = stats is None  # normalisation has a scale for each key
    direction, offset = distance.directions(keys, relative)
    if offset is None:
        offset = direction.new_zeros(direction.shape[:-1])
    scale = torch.ones_like(offset) / tau
    if stats is not None:
        scale = scale * stats.scale()
        offset = offset - stats.mean
    direction, offset = direction * scale.unsqueeze(-1), offset * scale
    features = distance.features(query, relative)
    rows = _Native.apply(features, direction, offset, values, codes)
    return _by_token(rows, codes)


def _flat_rows(values: Tensor, codes: Tensor) -> Tensor:
    """What `look_up` gives as (tokens * D, d/D), not a view: models may add to their embeddings in
    place, which autograd forbids for a view that a Function returns."""
    G, K, size = values.shape
    return values.reshape(G * K, size).index_select(0, value_rows(codes, G, K))


def _by_token(rows: Tensor, codes: Tensor) -> Tensor:
    return rows.view(codes.shape[0], codes.shape[1], rows.shape[-1])


class _SoftmaxExchange(torch.autograd.Function):
    """h_j = w V_j with w = p - stopgrad(p - onehot(code)): dL/dV sees the one-hot w, dL/dw flows
    into the softmax p as if w were p."""

    @staticmethod
    def forward(ctx: Any, resp: Tensor, values: Tensor, codes: Tensor, tau: float) -> Tensor:
        ctx.tau = tau
        ctx.save_for_backward(resp, values, codes)
        return _flat_rows(values, codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        resp, values, codes = ctx.saved_tensors
        grad = _by_token(grad.contiguous(), codes)
        grad_resp = grad_values = None
        if ctx.needs_input_grad[0]:
            if values.shape[0] == 1:
                grad_w = torch.matmul(grad, values[0].t())
            else:
                grad_w = torch.bmm(grad.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)
            p = torch.softmax(resp if ctx.tau == 1 else resp / ctx.tau, -1)
            grad_resp = torch._softmax_backward_data(grad_w, p, -1, p.dtype)
            if ctx.tau != 1:
                grad_resp = grad_resp / ctx.tau
        if ctx.needs_input_grad[1]:
            grad_values = sum_by_code(grad, codes, values.shape[0], values.shape[1])
        return grad_resp, grad_values, None, None


class _Recomputed(torch.autograd.Function):
    """Many rows whose codes are known: the value rows forward, without any response. Backward,
    the responses are worked out for a chunk of rows at a time instead of held."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        codes: Tensor,
        stats: Stats | None,
        distance: Dot,
        tau: float | Tensor,
    ) -> Tensor:
        # Running statistics may move on before the backward pass.
        ctx.save_for_backward(query, keys, values, codes, *(part.clone() for part in stats or ()))
        ctx.distance, ctx.tau = distance, tau
        return _flat_rows(values, codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, codes, *saved = ctx.saved_tensors
        stats = Stats(*saved) if saved else None
        grad = _by_token(grad.contiguous(), codes)
        keys = keys.detach().requires_grad_()
        G, K, _ = keys.shape
        grad_keys = torch.zeros_like(keys)
        rows = []
        for part in chunks(query, K):
            shape = query[part].shape
            with torch.enable_grad():
                own = by_group(query[part].detach(), G).requires_grad_()
                score = ctx.distance.scores(own, keys)
            scale = 1 / (ctx.tau.unsqueeze(-1) if isinstance(ctx.tau, Tensor) else ctx.tau)
            resp = score.detach()
            if stats is not None:
                scale = scale * stats.scale().unsqueeze(-1)
                resp = resp - stats.mean.unsqueeze(-1)
            p = torch.softmax(resp * scale, 1)
            grad_w = torch.bmm(values, by_group(grad[part], G).transpose(1, 2))
            grad_score = torch._softmax_backward_data(grad_w, p, 1, p.dtype) * scale
            row, grad_k = torch.autograd.grad(score, (own, keys), grad_score)
            rows.append(row.view(shape) if G == 1 else row.transpose(0, 1))
            grad_keys += grad_k
        grad_values = sum_by_code(grad, codes, values.shape[0], values.shape[1])
        grad_query = torch.cat(rows) if rows else torch.zeros_like(query)
        return grad_query, grad_keys, grad_values, None, None, None, None


class _Native(torch.autograd.Function):
    """The same by the native library, from features that responses are linear in."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, direction: Tensor, offset: Tensor, values: Tensor, codes: Tensor
    ) -> Tensor:
        ctx.save_for_backward(features, direction, offset, values, codes)
        return _flat_rows(values, codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, direction, offset, values, codes = ctx.saved_tensors
        grad = _by_token(grad.contiguous(), codes)
        of_keys = any(ctx.needs_input_grad[1:3])
        found = native.softmax_gradients(features, direction, offset, values, codes, grad, of_keys)
        assert found is not None
        return (*found, None)
