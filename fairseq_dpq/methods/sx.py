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
from fairseq_dpq.training.codes import by_group, chunks, sum_by_code, value_rows


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
    compared = "keys"

    def defaults(self, c: SXOptions, use: TableUse) -> dict[str, Any]:
        # From a random start, a soft gradient finds better codes; after a warm-up there are good
        # ones already, and a harder one is nearer to the truth.
        own = super().defaults(c, use)
        return {**own, "tau": 1.0 if own["schedule"] == "paper" else 0.05}

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: SXOptions) -> Tensor:
        if not torch.is_grad_enabled():
            return super().rebuild(rows, codes, book, c)
        # Copies, because an update may set both before the backward pass reads them.
        keys, values = book.keys.float().clone(), book.values.float().clone()
        if c.by_paper:
            stats = book.stats()
            direction, offset, scale = keys, -stats.mean, stats.scale() / c.tau
        else:  # but for |q|^2, which is the same for all keys, so that a softmax does not see it
            direction, offset = 2 * keys, -keys.pow(2).sum(-1)
            scale = 1 / (c.tau * _spread(keys))
        direction, offset = direction * scale.unsqueeze(-1), offset * scale
        found = _SoftmaxLookup.apply(self.by_group(rows, c), direction, offset, values, codes)
        return found.view(rows.shape)


def _spread(keys: Tensor) -> Tensor:
    """The mean squared distance of the keys of a group from their middle, (G, 1): a temperature in
    this unit means the same whatever the scale of the table is."""
    offset = keys.detach() - keys.detach().mean(1, keepdim=True)
    return offset.pow(2).sum(-1).mean(1, keepdim=True).clamp_min(1e-12)


# Gradients ----------------------------------------------------------------------------------------


class _SoftmaxLookup(torch.autograd.Function):
    """The value rows (tokens * D, d/D) of codes (tokens, D), with the gradient of a softmax over
    the K responses <features, direction> + offset of each group: h_j = w V_j with
    w = p - stopgrad(p - onehot(code)). dL/dV sees the one-hot w, dL/dw flows into the softmax p as
    if w were p. No response is held: the backward pass works them out again, in the native library
    where it is there.

    Shapes: features (tokens, D, m), direction (G, K, m), offset (G, K), values (G, K, d/D).
    """

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
