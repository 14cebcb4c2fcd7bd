"""DPQ-VQ: the nearest centroid forward, the gradient straight through to the query backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_dpq import initialization
from fairseq_dpq.averages import CentroidAverage
from fairseq_dpq.codebook import Codebook, Penalty, Step
from fairseq_dpq.codes import look_up
from fairseq_dpq.initialization import Clusters, Trained
from fairseq_dpq.kmeans import means
from fairseq_dpq.methods.base import KeyedMethod, Need, Options, Say, half_scale
from fairseq_dpq.statistics import Shapes, Tracker

_TINY = 1e-12


class VQ(KeyedMethod):
    """Centroid-based: the keys are the values, moved by a regulariser or by an average."""

    name = "vq"
    options = (*KeyedMethod.options, "reg_weight", "commitment", "ema_decay", "rotation_trick")
    default_distance = "euclidean"
    regularized = True
    collapse_hints = ("--dpq-rotation-trick",)

    def validate(self, c: Options, embedding_dim: int | None, need: Need, say: Say) -> None:
        need(
            c.distance in (None, "euclidean"),
            "distance",
            "vq compares by euclidean distance only; leave it out, or use " + say("method", "sx"),
        )
        need(
            c.reg_weight is None or c.reg_weight >= 0,
            "reg_weight",
            "must not be negative; try 1.0",
        )
        need(
            c.commitment is None or c.commitment >= 0,
            "commitment",
            "must not be negative; try 0.5",
        )
        need(
            c.ema_decay is None or 0 <= c.ema_decay < 1,
            "ema_decay",
            "must be in [0, 1); try 0.99, or 0 for off",
        )
        if embedding_dim is not None:
            size = embedding_dim // c.D
            need(
                c.key_dim in (None, size),
                "key_dim",
                f"the keys of vq are its values, of size {size} (embedding size / D); leave it "
                "out, or use " + say("method", "sx"),
            )

    def defaults(self, c: Options, tied: bool, max_update: int) -> dict[str, Any]:
        # The nearest centroid gives the code; normalised distances often prefer another.
        own = {
            "reg_weight": 1.0,
            "commitment": 0.5,
            # A weight of the regulariser is asked for by those who want it to move the centroids.
            "ema_decay": 0.99 if c.reg_weight is None else 0.0,
            "normalize": c.batch_stats,
        }
        return {**super().defaults(c, tied, max_update), **own}

    def initialize(self, parameters: dict[str, Tensor], c: Options, tied: bool) -> None:
        """Queries at half the scale of the table that they replace, and centroids among them.

        There is no softmax to keep flat as in sx, and rows that start too small are slow to learn:
        the inputs of a Transformer add positions to them, and a tied output multiplies by them.
        A whole random start is more than codes should have to spell out. Far from the queries, one
        or two centroids would take all.
        """
        scale = half_scale(parameters["query"])
        self._draw([parameters["query"], parameters["values"]], scale, c)

    def constants(self, c: Options) -> tuple[str, ...]:
        return ("values",) if c.ema_decay else ()

    def _own_trackers(self, c: Options, shapes: Shapes) -> list[Tracker]:
        groups, K, size = shapes["values"]
        return [CentroidAverage(groups, K, size, c.ema_decay)] if c.ema_decay else []

    def _train_by_responses(self, rows: Tensor, book: Codebook, c: Options) -> Step:
        q = self.by_group(rows, c)
        keys, _ = book.float()
        with torch.no_grad():
            _, codes, batch = self._assign(q, keys, book, c)
        out = self.rebuild(rows, codes, book, c)
        return Step(out, q.detach(), codes, batch, self._penalty(q, codes, book, c))

    def _penalty(self, q: Tensor, codes: Tensor, book: Codebook, c: Options) -> Penalty | None:
        if not torch.is_grad_enabled() or not q.shape[0]:
            return None
        # Sums over the dimensions of a row: a weight then means the same whatever their number.
        _, values = book.float()
        centroid = look_up(values, codes)
        total = q.new_zeros(())
        error = (centroid - q.detach()).pow(2).sum()
        if not c.ema_decay:  # with weight 0 too: DDP wants a gradient of each parameter
            total = total + c.reg_weight * error
        if c.commitment:
            total = total + c.commitment * (centroid.detach() - q).pow(2).sum()
        return Penalty(total, error.detach() / q[0].numel(), q.shape[0])

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: Options) -> Tensor:
        _, values = book.float()
        out = look_up(values, codes)
        if torch.is_grad_enabled():
            out = straight_through(self.by_group(rows, c), out, values, c.rotation_trick)
        return out.flatten(1)

    def reseed(self, book: Codebook, dead: Tensor, query: Tensor, codes: Tensor) -> None:
        initialization.reseed_keys(book, dead, query)

    def start_from_table(self, book: Codebook, c: Options, trained: Trained) -> None:
        groups, K, _ = book.values.shape
        found = initialization.cluster_table(trained, groups, K, c.D)
        book.values.copy_(found.centroids)
        book.query.copy_(trained.table)
        self._vocabulary_statistics(book, c, trained.real)
        if c.normalize:
            self._settle(book, c, found, trained.real)

    @torch.no_grad()
    def start_from_plain(self, book: Codebook, c: Options, trained: Trained) -> None:
        groups, K, _ = book.values.shape
        found = initialization.cluster_table(trained, groups, K, c.D)
        book.values.copy_(found.centroids)
        self._vocabulary_statistics(book, c, trained.real)

    def _settle(self, book: Codebook, c: Options, found: Clusters, real: Tensor) -> None:
        """Make normalised distances give the codes that k-means gave, as nearly as they can.

        Normalised distances prefer other centroids than the nearest. First the queries that got
        another code are drawn to their centroids, then all. Where that is not enough, as with
        groups of one or two dimensions, centroids become the means of what they do get, while
        that helps.
        """
        groups, K, _ = book.values.shape
        table = book.query.detach().clone()
        best = (float("inf"), table, book.values.detach().clone())

        def codes_now() -> Tensor:
            return initialization.grouped_codes(self._table_codes(book, c), groups, found.rows)

        def take_if_better() -> None:
            nonlocal best
            self._vocabulary_statistics(book, c, real)
            triples = zip(found.points, book.values.float(), codes_now())
            error = sum(float((p - v[k]).pow(2).sum()) for p, v, k in triples)
            if error < best[0]:
                best = (error, book.query.detach().clone(), book.values.detach().clone())

        take_if_better()
        for share, all_rows in (
            (0.5, False),
            (0.5, False),
            (0.5, False),
            (1.0, False),
            (1.0, True),
        ):
            got = self._table_codes(book, c)
            if torch.equal(got[real], found.codes[real]):
                return
            wanted = found.codes if all_rows else found.codes.masked_fill(got == found.codes, -1)
            initialization.pull_queries(book, book.values, wanted, share)
            take_if_better()
        book.query.copy_(table)
        self._vocabulary_statistics(book, c, real)
        for _ in range(10):
            mean, mass = means(found.points, codes_now(), K)
            book.values.copy_(torch.where((mass > 0).unsqueeze(-1), mean, book.values.float()))
            take_if_better()
        book.query.copy_(best[1])
        book.values.copy_(best[2])
        self._vocabulary_statistics(book, c, real)


# Gradients ----------------------------------------------------------------------------------------


def straight_through(query: Tensor, centroid: Tensor, values: Tensor, rotation: bool) -> Tensor:
    """The centroids, rows of the values, with a gradient for the queries."""
    function = _Rotation if rotation else _StraightThrough
    return function.apply(query, centroid.detach(), values)


class _StraightThrough(torch.autograd.Function):
    """The centroid forward, the gradient straight to the query: q - stopgrad(q - V[code]).

    The values are an input without a gradient, so that a search of the graph for parameters in
    use (DDP's find_unused_parameters) finds them: the regulariser's gradient does reach them.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, centroid: Tensor, values: Tensor) -> Tensor:
        return centroid.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Rotation(torch.autograd.Function):
    """The rotation trick (Fifty et al., 2024): the centroid e forward; backward, the gradient
    goes through the fixed linear map that rotates and scales the query q onto e.

    With unit vectors q', e' and r = (q' + e') / |q' + e'|, that map is
    R = |e|/|q| (I - 2 r r^T + 2 e' q'^T), and dL/dq = R^T dL/dh. The values are as above.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, centroid: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(query, centroid)
        return centroid.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        query, centroid = ctx.saved_tensors
        q_norm = query.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        e_norm = centroid.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        q, e = query / q_norm, centroid / e_norm
        r = q + e
        r = r / r.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        turned = grad - 2 * r * (r * grad).sum(-1, keepdim=True)
        turned = turned + 2 * q * (e * grad).sum(-1, keepdim=True)
        return turned * (e_norm / q_norm), None, None
