"""Distance normalisation: batch norm of the responses, without an affine part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_dpq.training.distances import Dot, exact_sqrt

EPS = 1e-3  # added to the variance of the responses


class Stats(NamedTuple):
    """Mean and variance of the responses: (D, K), or (1, K) when subspaces are shared."""

    mean: Tensor
    var: Tensor

    def scale(self) -> Tensor:
        """What centred responses are multiplied by."""
        return 1 / exact_sqrt(self.var + EPS)

    def detach(self) -> Stats:
        """A copy without gradient that does not follow the running statistics."""
        return Stats(self.mean.detach().clone(), self.var.detach().clone())


def normalize(resp: Tensor, stats: Stats) -> Tensor:
    """Normalise responses by given statistics, as evaluation does."""
    return (resp - stats.mean) * stats.scale()


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


def batch_normalize(resp: Tensor, shared: bool) -> tuple[Tensor, Stats]:
    """Normalise responses by this batch's own statistics, per k or per (j, k)."""
    tokens, D, K = resp.shape
    flat = resp.reshape(tokens * D, K) if shared else resp.reshape(tokens, D * K)
    out, mean, invstd = torch.native_batch_norm(flat, None, None, None, None, True, 0.0, EPS)
    var = (invstd.detach().pow(-2) - EPS).clamp_min(0)
    return out.view(tokens, D, K), Stats(mean.detach().view(-1, K), var.view(-1, K))
