"""DPQ-SX: the hard value row forward, the gradient of a softmax over the keys backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_dpq import native
from fairseq_dpq.config import option
from fairseq_dpq.methods.base import TableUse
from fairseq_dpq.methods.keyed import KeyedMethod, KeyedOptions
from fairseq_dpq.training.codebook import Codebook
from fairseq_dpq.training.codes import by_group, chunks, look_up, sum_by_code, value_rows
from fairseq_dpq.training.distances import DISTANCES, Dot
from fairseq_dpq.training.initialization import reseed_keys
from fairseq_dpq.training.trackers import KeyAverage, Shapes, Tracker

_DECAY = 0.9  # of the average that keys follow


@dataclass
class SXOptions(KeyedOptions):
    tau: float = option(
        None,
        "temperature of the softmax that gives the gradient (default: 0.05, in units of the keys' "
        "mean squared distance from their middle; 1.0 with --dpq-schedule paper)",
        valid=lambda tau: tau > 0,
        right="must be above 0; try 1.0",
    )


class SX(KeyedMethod[SXOptions]):
    """Softmax-based: separate keys and values."""

    name = "sx"
    summary = "softmax-based, separate keys and values"
    options = SXOptions
    has_keys = True
    drawn = ("query", "keys")

    def distance(self, c: SXOptions) -> Dot:
        return DISTANCES["dot" if c.by_paper else "euclidean"]

    def defaults(self, c: SXOptions, use: TableUse) -> dict[str, Any]:
        # From a random start, a soft gradient finds better codes; after a warm-up there are good
        # ones already, and a harder one is nearer to the truth.
        own = super().defaults(c, use)
        return {**own, "tau": 1.0 if own["schedule"] == "paper" else 0.05}

    def constants(self, c: SXOptions) -> tuple[str, ...]:
        return () if c.by_paper else ("keys",)

    def shapes(self, c: SXOptions, num_embeddings: int, embedding_dim: int) -> Shapes:
        shapes = super().shapes(c, num_embeddings, embedding_dim)
        return {**shapes, "keys": shapes["values"]}

    def average(self, c: SXOptions, shapes: Shapes) -> Tracker:
        groups, K, size = shapes["values"]
        return KeyAverage(groups, K, size, _DECAY)

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: SXOptions) -> Tensor:
        if not torch.is_grad_enabled():
            return look_up(book.values.float(), codes).flatten(1)
        # Copies, because an update may set both before the backward pass reads them.
        keys, values = book.keys.float().clone(), book.values.float().clone()
        nearest = book.stats is None  # normalisation has a scale for each key
        distance = self.distance(c)
        direction, offset = distance.directions(keys, relative=nearest)
        if book.stats is None:
            scale = 1 / (c.tau * _spread(keys))
        else:
            scale = book.stats.scale() / c.tau
            offset = offset - book.stats.mean
        features = distance.features(self.by_group(rows, c), relative=nearest)
        return softmax_lookup(
            features, direction * scale.unsqueeze(-1), offset * scale, values, codes
        ).flatten(1)

    def reseed(self, book: Codebook, dead: Tensor, query: Tensor, codes: Tensor) -> None:
        group, code, row, source = reseed_keys(book, dead, query)
        # The value of the token's present code: its embedding does not jump when it changes.
        book.values[group, code] = book.values[group, codes[row, source]]


def _spread(keys: Tensor) -> Tensor:
    """The mean squared distance of the keys of a group from their middle, (G, 1): a temperature in
    this unit means the same whatever the scale of the table is."""
    offset = keys.detach() - keys.detach().mean(1, keepdim=True)
    return offset.pow(2).sum(-1).mean(1, keepdim=True).clamp_min(1e-12)


# Gradients ----------------------------------------------------------------------------------------


def softmax_lookup(
    features: Tensor, direction: Tensor, offset: Tensor, values: Tensor, codes: Tensor
) -> Tensor:
    """The value rows of codes (tokens, D), as (tokens, D, d/D), with the gradient of a softmax over
    the K responses <features, direction> + offset of each group.

    Shapes: features (tokens, D, m), direction (G, K, m), offset (G, K), values (G, K, d/D).
    """
    rows = _SoftmaxLookup.apply(features, direction, offset, values, codes)
    return rows.view(*codes.shape, rows.shape[-1])


class _SoftmaxLookup(torch.autograd.Function):
    """h_j = w V_j with w = p - stopgrad(p - onehot(code)): dL/dV sees the one-hot w, dL/dw flows
    into the softmax p as if w were p. No response is held: the backward pass works them out again,
    in the native library where it is there."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        values, codes = parts[3:]
        G, K, size = values.shape
        # Not a view: models may add to their embeddings in place, which autograd forbids for a view
        # that a Function returns.
        return values.reshape(G * K, size).index_select(0, value_rows(codes, G, K))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, direction, offset, values, codes = ctx.saved_tensors
        grad = grad.contiguous().view(*codes.shape, values.shape[-1])
        given = features, direction, offset, values, codes, grad, any(ctx.needs_input_grad[1:3])
        found = native.softmax_gradients(*given)
        return (*(softmax_gradients(*given) if found is None else found), None)


def softmax_gradients(
    features: Tensor,
    direction: Tensor,
    offset: Tensor,
    values: Tensor,
    codes: Tensor,
    grad: Tensor,
    of_keys: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """What `native.softmax_gradients` computes, in PyTorch, for a chunk of rows at a time."""
    G, K, _ = direction.shape
    grad_direction = torch.zeros_like(direction) if of_keys else None
    grad_offset = torch.zeros_like(offset) if of_keys else None
    rows = []
    for part in chunks(features, K):
        own, above = by_group(features[part], G), by_group(grad[part], G)
        score = torch.baddbmm(offset.unsqueeze(-1), direction, own.transpose(1, 2))  # (G, K, rows)
        p = torch.softmax(score, 1)
        grad_w = torch.bmm(values, above.transpose(1, 2))
        grad_score = torch._softmax_backward_data(grad_w, p, 1, p.dtype)
        row = torch.bmm(grad_score.transpose(1, 2), direction)  # (G, rows, m)
        rows.append(row.view_as(features[part]) if G == 1 else row.transpose(0, 1))
        if grad_direction is not None and grad_offset is not None:
            grad_direction += torch.bmm(grad_score, own)
            grad_offset += grad_score.sum(-1)
    grad_features = torch.cat(rows) if rows else torch.zeros_like(features)
    return grad_features, grad_direction, grad_offset, sum_by_code(grad, codes, G, K)
