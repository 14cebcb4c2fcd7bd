"""How near a query is to a key: one object for each distance, larger is nearer.

Shapes: query (tokens, D, size), keys (G, K, size) with G = D, or 1 when subspaces are shared.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Dot:
    """<q, k>."""

    name = "dot"

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """The response of queries by group (G, tokens, size) to each key: (G, K, tokens).

        With many rows this layout is faster on a CPU: what follows is vectorised over the tokens.
        """
        return torch.bmm(keys, query.transpose(1, 2))

    def ordered_response(self, query: Tensor, keys: Tensor) -> Tensor:
        """The response that defines a code: summed over one dimension after the other.

        Elementwise float32 operations are rounded alike everywhere, unlike a matrix product.
        `query` is (rows, size), `keys` (rows or 1, K, size); the result is (rows, K).
        """
        total = self._term(query[:, :1], keys[..., 0])
        for i in range(1, query.shape[-1]):
            total = total + self._term(query[:, i : i + 1], keys[..., i])
        return total

    def rounding(self, keys: Tensor, terms: float) -> tuple[Tensor, Tensor]:
        """(slope, offset), each (G,): rounding stays below slope * `query_size` + offset.

        The rounding of a sum of m products is at most about m u sum|a b|; `terms` is m u.
        """
        largest = keys.norm(dim=-1).amax(-1)
        return terms * largest, torch.zeros_like(largest)

    def query_size(self, query: Tensor) -> Tensor:
        """What the slope of `rounding` is multiplied by."""
        return query.norm(dim=-1)

    def features(self, query: Tensor, relative: bool = False) -> Tensor:
        """What responses are linear in: (tokens, D, m). `relative`: but for what is the same for
        all keys, which a softmax over them does not see."""
        return query

    def directions(self, keys: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """(G, K, m) and (G, K): response = <features, direction> + offset."""
        return keys, keys.new_zeros(keys.shape[:-1])

    def _term(self, query: Tensor, key: Tensor) -> Tensor:
        return query * key


class Euclidean(Dot):
    """-|q - k|^2, spelled out so that the (tokens, D, K, size) difference is never held."""

    name = "euclidean"

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        square = keys.pow(2).sum(-1, keepdim=True)
        out = torch.baddbmm(square, keys, query.transpose(1, 2), beta=-1, alpha=2)
        return out.sub_(query.pow(2).sum(-1).unsqueeze(1))

    def rounding(self, keys: Tensor, terms: float) -> tuple[Tensor, Tensor]:
        # |q - k|^2 <= 2 |q|^2 + 2 |k|^2
        largest = keys.norm(dim=-1).amax(-1)
        return torch.full_like(largest, 2 * terms), 2 * terms * largest * largest

    def query_size(self, query: Tensor) -> Tensor:
        norm = query.norm(dim=-1)
        return norm * norm

    def features(self, query: Tensor, relative: bool = False) -> Tensor:
        if relative:
            return query
        return torch.cat([query, query.pow(2).sum(-1, keepdim=True)], -1)

    def directions(self, keys: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        offset = -keys.pow(2).sum(-1)
        if relative:
            return 2 * keys, offset
        minus_one = keys.new_full((*keys.shape[:-1], 1), -1.0)
        return torch.cat([2 * keys, minus_one], -1), offset

    def _term(self, query: Tensor, key: Tensor) -> Tensor:
        difference = query - key
        return -(difference * difference)


DISTANCES: dict[str, Dot] = {d.name: d for d in (Dot(), Euclidean())}


def wide_dtype(device: torch.device) -> torch.dtype:
    """What long sums are held in: float64, or float32 on Apple's GPUs, which have nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded root, alike on every device that has float64. Neither rsqrt nor torch's
    float32 sqrt is: on a CPU it comes from a vector library."""
    return x.to(wide_dtype(x.device)).sqrt().to(x.dtype)
