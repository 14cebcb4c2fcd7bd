"""How near a query is to a key: one object for each distance, larger is nearer. Normalisation of
these responses is batch norm without an affine part.

Shapes: query (tokens, D, size), keys (G, K, size) with G = D, or 1 when subspaces are shared.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, NamedTuple

import torch
from torch import Tensor

EPS = 1e-3  # added to the variance of the responses


class Dot:
    """<q, k>."""

    name = "dot"

    def response(self, query: Tensor, keys: Tensor) -> Tensor:
        """The responses that define codes, (tokens, D, K): summed over one dimension after another.

        Elementwise float32 operations are rounded alike everywhere, unlike a matrix product.
        """
        total = self._term(query[..., :1], keys[..., 0])
        for i in range(1, query.shape[-1]):
            total += self._term(query[..., i : i + 1], keys[..., i])
        return total

    def features(self, query: Tensor) -> Tensor:
        """What responses are linear in: (tokens, D, m)."""
        return query

    def directions(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(G, K, m) and (G, K): response = <features, direction> + offset."""
        return keys, keys.new_zeros(keys.shape[:-1])

    def _term(self, query: Tensor, key: Tensor) -> Tensor:
        return query * key


class Euclidean(Dot):
    """-|q - k|^2."""

    name = "euclidean"

    def features(self, query: Tensor) -> Tensor:
        return torch.cat([query, query.pow(2).sum(-1, keepdim=True)], -1)

    def directions(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        minus_one = keys.new_full((*keys.shape[:-1], 1), -1.0)
        return torch.cat([2 * keys, minus_one], -1), -keys.pow(2).sum(-1)

    def _term(self, query: Tensor, key: Tensor) -> Tensor:
        difference = query - key
        return -(difference * difference)


DISTANCES: dict[str, Dot] = {d.name: d for d in (Dot(), Euclidean())}


class Stats(NamedTuple):
    """Mean and variance, of responses (D, K), or (1, K) when subspaces are shared."""

    mean: Tensor
    var: Tensor

    def scale(self) -> Tensor:
        """What centred responses are multiplied by: the correctly rounded root, alike on every
        device that has float64. Neither rsqrt nor torch's float32 sqrt is: on a CPU it comes from a
        vector library."""
        var = self.var + EPS
        return 1 / var.to(wide_dtype(var.device)).sqrt().to(var.dtype)

    def normalize(self, response: Tensor) -> Tensor:
        """Responses by these statistics, as evaluation has them."""
        return (response - self.mean) * self.scale()

    def detach(self) -> Stats:
        """A copy without gradient that does not follow the running statistics."""
        return Stats(self.mean.detach().clone(), self.var.detach().clone())


def batch_statistics(query: Tensor, keys: Tensor, distance: Dot) -> Stats | None:
    """Mean and variance of the responses of queries (tokens, D, size), with their gradient; None if
    there are too few.

    Responses are linear in the features of a query, so that their moments come from those of the
    features, which are fewer than the keys: no response is worked out.
    """
    features = distance.features(query)
    if keys.shape[0] == 1:
        features = features.reshape(-1, 1, features.shape[-1])
    if features.shape[0] < 2:  # one value has no spread to normalise by
        return None
    direction, offset = distance.directions(keys)
    by_group = features.transpose(0, 1)  # (G, tokens, m)
    middle = by_group.mean(1, keepdim=True)
    centred = by_group - middle
    mean = torch.bmm(direction, middle.transpose(1, 2)).squeeze(-1)
    if features.shape[-1] <= keys.shape[1]:
        covariance = torch.bmm(centred.transpose(1, 2), centred) / features.shape[0]
        var = (torch.bmm(direction, covariance) * direction).sum(-1).clamp_min(0)
    else:
        var = torch.bmm(centred, direction.transpose(1, 2)).pow(2).mean(1)
    return Stats(mean + offset, var)


def batch_normalize(x: Tensor) -> tuple[Tensor, Stats]:
    """Batch norm over all but the last dimension, and the statistics (1, size) of this batch."""
    flat = x.reshape(-1, x.shape[-1])
    out, mean, invstd = torch.native_batch_norm(flat, None, None, None, None, True, 0.0, EPS)
    var = (invstd.detach().pow(-2) - EPS).clamp_min(0)
    return out.view(x.shape), Stats(mean.detach().unsqueeze(0), var.unsqueeze(0))


# Precision ----------------------------------------------------------------------------------------


def float32_math(device: torch.device) -> ContextManager[Any]:
    """Switch autocast off: responses and codes are float32 whatever the model runs in."""
    if device.type in ("cpu", "cuda"):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def wide_dtype(device: torch.device) -> torch.dtype:
    """What long sums are held in: float64, or float32 on Apple's GPUs, which have nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64
