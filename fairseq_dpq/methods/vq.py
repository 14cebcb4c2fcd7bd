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

_TINY = 1e-12


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
    rotation_trick: bool = option(
        False, "pass the gradient through the rotation from query to centroid"
    )


class VQ(KeyedMethod[VQOptions]):
    """Centroid-based: the keys are the values, moved by an average, or by the regulariser."""

    name = "vq"
    summary = "centroid-based, keys are the values"
    options = VQOptions
    regularized = True
    # There is no softmax to keep flat as in sx, and rows that start too small are slow to learn:
    # the inputs of a Transformer add positions to them. Centroids start among the queries: far
    # from them, one or two would take all.
    starts_wide = True

    def defaults(self, c: VQOptions, use: TableUse) -> dict[str, Any]:
        own = super().defaults(c, use)
        if own["schedule"] == "paper":
            return {**own, "regularizer_weight": 1 / use.embedding_dim, "commitment": 0.0}
        return {**own, "ema_decay": 0.99, "commitment": 0.5}

    def collapse_hints(self, c: VQOptions) -> list[tuple[str, Any]]:
        own: list[tuple[str, Any]] = [] if c.rotation_trick else [("rotation_trick", True)]
        return [*super().collapse_hints(c), *own]

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
        values = book.values.float()
        out = look_up(values, codes)
        if torch.is_grad_enabled():
            query = self.by_group(rows, c)
            out = _StraightThrough.apply(query, out.detach(), values, c.rotation_trick)
        return out.flatten(1)


class _StraightThrough(torch.autograd.Function):
    """The centroid e forward, the gradient straight to the query q: q - stopgrad(q - e). Or, by the
    rotation trick (Fifty et al., 2024), through the fixed linear map that rotates and scales q onto
    e: with unit vectors q', e' and r = (q' + e') / |q' + e'|, that map is
    R = |e|/|q| (I - 2 r r^T + 2 e' q'^T), and dL/dq = R^T dL/dh.

    The values are an input without a gradient, so that a search of the graph for parameters in
    use (DDP's find_unused_parameters) finds them: the regulariser's gradient does reach them.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, centroid: Tensor, values: Tensor, rotation: bool
    ) -> Tensor:
        if rotation:
            ctx.save_for_backward(query, centroid)
        return centroid.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved_tensors:
            query, centroid = ctx.saved_tensors
            q_norm = query.norm(dim=-1, keepdim=True).clamp_min(_TINY)
            e_norm = centroid.norm(dim=-1, keepdim=True).clamp_min(_TINY)
            q, e = query / q_norm, centroid / e_norm
            r = q + e
            r = r / r.norm(dim=-1, keepdim=True).clamp_min(_TINY)
            turned = grad - 2 * r * (r * grad).sum(-1, keepdim=True)
            turned = turned + 2 * q * (e * grad).sum(-1, keepdim=True)
            grad = turned * (e_norm / q_norm)
        return grad, None, None, None
