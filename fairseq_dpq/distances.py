"""How near a query is to a key: one object for each distance, larger is nearer.

Shapes: query (tokens, D, size), keys (G, K, size) with G = D, or 1 when subspaces are shared.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-12  # smallest norm of a query or key that cosine divides by


class Dot:
    """<q, k>."""

    name = "dot"

    def response(self, query: Tensor, keys: Tensor) -> Tensor:
        """The response of each query to each key: (tokens, D, K)."""
        query, keys = self._compared(query), self._compared(keys)
        if keys.shape[0] == 1:
            return torch.matmul(query, keys[0].t())
        return torch.bmm(query.transpose(0, 1), keys.transpose(1, 2)).transpose(0, 1)

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """`response` of queries by group (G, tokens, size), tokens last: (G, K, tokens).

        With many rows this layout is faster on a CPU: what follows is vectorised over the tokens.
        """
        return torch.bmm(self._compared(keys), self._compared(query).transpose(1, 2))

    def ordered_response(self, query: Tensor, keys: Tensor) -> Tensor:
        """The response that defines a code: summed over one dimension after the other.

        Elementwise float32 operations are rounded alike everywhere, unlike a matrix product.
        `query` is (rows, size), `keys` (rows or 1, K, size); the result is (rows, K).
        """
        total = self._term(query[:, :1], keys[..., 0])
        for i in range(1, query.shape[-1]):
            total = total + self._term(query[:, i : i + 1], keys[..., i])
        return total

    def ordered_rows(self, rows: Tensor) -> Tensor:
        """Queries or keys as `ordered_response` takes them."""
        return rows

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
        return self._compared(query)

    def directions(self, keys: Tensor, relative: bool = False) -> tuple[Tensor, Tensor | None]:
        """(G, K, m) and (G, K) or None: response = <features, direction> + offset."""
        return self._compared(keys), None

    def _compared(self, rows: Tensor) -> Tensor:
        return rows

    def _term(self, query: Tensor, key: Tensor) -> Tensor:
        return query * key


class Cosine(Dot):
    """<q / |q|, k / |k|>."""

    name = "cosine"

    def ordered_rows(self, rows: Tensor) -> Tensor:
        total = rows[..., 0] * rows[..., 0]
        for i in range(1, rows.shape[-1]):
            total = total + rows[..., i] * rows[..., i]
        return rows / exact_sqrt(total).clamp_min(_TINY).unsqueeze(-1)

    def rounding(self, keys: Tensor, terms: float) -> tuple[Tensor, Tensor]:
        zero = keys.new_zeros(keys.shape[0])
        return zero, zero + terms

    def query_size(self, query: Tensor) -> Tensor:
        return query.new_ones(query.shape[:-1])

    def _compared(self, rows: Tensor) -> Tensor:
        return rows / rows.norm(dim=-1, keepdim=True).clamp_min(_TINY)


class Euclidean(Dot):
    """-|q - k|^2, spelled out so that the (tokens, D, K, size) difference is never held."""

    name = "euclidean"

    def response(self, query: Tensor, keys: Tensor) -> Tensor:
        tokens, D, size = query.shape
        square = keys.pow(2).sum(-1)
        if keys.shape[0] == 1:
            rows = query.reshape(tokens * D, size)
            out = torch.addmm(square[0], rows, keys[0].t(), beta=-1, alpha=2)
            out = out.view(tokens, D, keys.shape[1])
        else:
            groups = query.transpose(0, 1), keys.transpose(1, 2)
            out = torch.baddbmm(square.unsqueeze(1), *groups, beta=-1, alpha=2).transpose(0, 1)
        return out.sub_(query.pow(2).sum(-1, keepdim=True))

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

    def directions(self, keys: Tensor, relative: bool = False) -> tuple[Tensor, Tensor | None]:
        offset = -keys.pow(2).sum(-1)
        if relative:
            return 2 * keys, offset
        minus_one = keys.new_full((*keys.shape[:-1], 1), -1.0)
        return torch.cat([2 * keys, minus_one], -1), offset

    def _term(self, query: Tensor, key: Tensor) -> Tensor:
        difference = query - key
        return -(difference * difference)


DISTANCES: dict[str, Dot] = {d.name: d for d in (Dot(), Euclidean(), Cosine())}


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded root, alike on every device. Neither rsqrt nor torch's float32 sqrt
    is: on a CPU it comes from a vector library."""
    return x.double().sqrt().to(x.dtype)
