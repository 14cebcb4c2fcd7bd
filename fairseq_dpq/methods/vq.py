"""DPQ-VQ: the nearest centroid forward, the gradient straight through to the query backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_dpq.config import option
from fairseq_dpq.methods.base import TableUse
from fairseq_dpq.methods.keyed import KeyedMethod, KeyedOptions
from fairseq_dpq.training.codebook import Codebook, RegularizerTerm, TrainOutput
from fairseq_dpq.training.codes import look_up


@dataclass
class VQOptions(KeyedOptions):
    regularizer_weight: float = option(
        None,
        "weight of the regulariser that moves the centroids (default: 1 / embedding size, so that "
        "they follow the mean error of a dimension)",
        valid=lambda w: w >= 0,
        right="must not be negative; try 0.005",
        needs="schedule=paper",
    )
    value_gradient: float = option(
        0.0,
        "with --dpq-schedule paper: share of the loss's gradient that moves the centroids as well; "
        "queries then start small and codes are by normalised dot products, both as in sx (0: as "
        "in the paper)",
        valid=lambda w: 0 <= w <= 1,
        right="must be from 0 (off) to 1; try 0.1",
        needs="schedule=paper",
        shapes=True,
    )
    commitment: float = option(
        None,
        "weight of the term that draws queries to their centroids (default: 0.5; 0 with "
        "--dpq-schedule paper)",
        valid=lambda w: w >= 0,
        right="must not be negative; try 0.5",
    )
    ema_decay: float = option(
        None,
        "decay of the moving average that the centroids follow (default: 0.99)",
        valid=lambda decay: 0 < decay < 1,
        right="must be between 0 and 1; try 0.99",
        needs="schedule=warmup",
    )

    @property
    def by_dot(self) -> bool:
        return self.value_gradient > 0


class VQ(KeyedMethod[VQOptions]):
    """Centroid-based: the keys are the values, moved by an average, or by the regulariser."""

    name = "vq"
    summary = "centroid-based, keys are the values"
    options = VQOptions
    regularized = True
    # Rows that start too small are slow to learn: a Transformer adds positions to them. Centroids
    # start among the queries: far from them, one or two would take all.
    starts_wide = True

    def defaults(self, c: VQOptions, use: TableUse) -> dict[str, Any]:
        own = super().defaults(c, use)
        if own["schedule"] == "paper":
            return {**own, "regularizer_weight": 1 / use.embedding_dim, "commitment": 0.0}
        return {**own, "ema_decay": 0.99, "commitment": 0.5}

    def collapse_hints(self, c: VQOptions) -> list[tuple[str, Any]]:
        hints = super().collapse_hints(c)
        return [("value_gradient", 0.1), *hints] if c.by_paper and not c.by_dot else hints

    def observe(self, rows: Tensor, codes: Tensor, book: Codebook, c: VQOptions) -> TrainOutput:
        seen = super().observe(rows, codes, book, c)
        if not torch.is_grad_enabled() or not len(rows):
            return seen
        q = self.by_group(rows, c)
        # Sums over the dimensions of a row: a weight then means the same whatever their number.
        centroid = look_up(book.values.float(), codes)
        total = q.new_zeros(())
        error = (centroid - q.detach()).pow(2).sum()
        if c.by_paper:  # with weight 0 too: DDP wants a gradient of each parameter
            total = total + c.regularizer_weight * error
        if c.commitment:
            total = total + c.commitment * (centroid.detach() - q).pow(2).sum()
        term = RegularizerTerm(total, error.detach() / q[0].numel(), q.shape[0])
        return seen._replace(regularizer=term)

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: VQOptions) -> Tensor:
        out = look_up(book.values.float(), codes)
        if torch.is_grad_enabled():
            query = self.by_group(rows, c)
            out = _StraightThrough.apply(query, out, c.value_gradient)
        return out.flatten(1)


class _StraightThrough(torch.autograd.Function):
    """The centroid forward, the gradient straight to the query: q - stopgrad(q - e).

    The centroid gets `share` of the gradient. With none it is an input too: a search of the graph
    (DDP's find_unused_parameters) must find the values, which the regulariser moves.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, centroid: Tensor, share: float) -> Tensor:
        ctx.share = share
        return centroid.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, ctx.share * grad if ctx.share else None, None
