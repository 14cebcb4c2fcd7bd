"""Which tiers a table gets: rows, K and D of each, for the least error in a number of bytes."""

from __future__ import annotations

import itertools
import math
from typing import Any, Iterator, NamedTuple, Tuple

import torch
from torch import Tensor

from fairseq_dpq.forms.packing import code_bits
from fairseq_dpq.sizes import MAX_K

_MOST_TIERS = 255

Tier = Tuple[int, int, int]  # rows, K, D; K = 1: all rows are one, which takes no bits
# Squared error of k-means on normal numbers, as a share of their variance, by K and numbers a code.
_ERROR: dict[int, dict[int, float]] = {
    16: {1: 0.0099, 2: 0.11, 3: 0.236, 4: 0.342, 5: 0.425, 6: 0.5, 7: 0.557, 8: 0.607, 10: 0.671,
         12: 0.721, 16: 0.783},
    64: {1: 0.0007, 2: 0.03, 3: 0.102, 4: 0.184, 5: 0.255, 6: 0.325, 7: 0.381, 8: 0.431, 10: 0.51,
         12: 0.576, 16: 0.662},
    256: {2: 0.0073, 3: 0.04, 4: 0.0915, 5: 0.145, 6: 0.202, 7: 0.253, 8: 0.3,
          10: 0.378, 12: 0.441, 16: 0.538},
}  # fmt: skip
_ERROR[32] = {s: math.sqrt(e * _ERROR[64][s]) for s, e in _ERROR[16].items()}
_MOST = 5  # tiers
_FEWEST = 256  # rows of a tier
_STEPS = 40  # boundaries that are tried, evenly in the logarithm of the row
_VALUE_BYTES = 2
# Rows become one where that leaves less than this share of the error: it loses more than their use
# says. On PTB (200 numbers a row, 57 times smaller) it is as good as short codes at 0.76.
_MERGED = 0.75


class _Kind(NamedTuple):
    K: int
    D: int
    error: float
    row_bytes: int
    fixed_bytes: int


class _Choice(NamedTuple):
    points: list[int]  # rows where a tier may end
    mass: list[float]  # importance up to there
    kinds: list[_Kind]
    last: list[_Kind]  # of the last of several tiers
    budget: int


def tier_bytes(tier: Tier, embedding_dim: int) -> int:
    """Bytes of the codes and values of a tier."""
    rows, K, D = tier
    if K == 1:
        return 1 + _VALUE_BYTES * embedding_dim
    return rows * ((D * code_bits(K) + 7) // 8) + _VALUE_BYTES * K * embedding_dim


def _kinds(d: int, gain: float) -> list[_Kind]:
    out: list[_Kind] = []
    for K, errors in _ERROR.items():
        for size, error in errors.items():
            if d % size == 0:
                one = tier_bytes((1, K, d // size), d)
                row = tier_bytes((2, K, d // size), d) - one
                out.append(_Kind(K, d // size, error * gain, row, one - row))
    return out


def choose_tiers(
    importance: Tensor, embedding_dim: int, budget: int, gain: float = 1.0
) -> list[Tier]:
    """The tiers of least expected error that take at most `budget` bytes. Each row has a code of
    its own where there is room for that, unless codes would be far too short then.

    Args:
        importance: What losing each row would cost, largest first (n,).
        gain: Error of the codes at hand as a share of that of plain k-means.
    """
    n = len(importance)
    total = torch.cat([torch.zeros(1, dtype=torch.float64), importance.double().cumsum(0).cpu()])
    few = min(_FEWEST, n)
    ends = {round(few * (n / few) ** (i / _STEPS)) for i in range(_STEPS + 1)} | {n}
    points = [0, *sorted(ends)]
    mass = total[points].tolist()
    kinds = _kinds(embedding_dim, gain)
    one = _Kind(1, 1, 1.0, 0, 1 + _VALUE_BYTES * embedding_dim)
    best: list[tuple[float, int, list[Tier]]] = []
    for last in (kinds, [*kinds, one]):
        choice = _Choice(points, mass, kinds, last, budget)
        for error, tiers in (*_at_prices(choice), *_few(choice)):
            best.append((error, sum(tier_bytes(tier, embedding_dim) for tier in tiers), tiers))
    own = [found for found in best if all(K > 1 for _, K, _ in found[2])]
    if best:
        least = min(best)
        return (min(own) if own and least[0] > _MERGED * min(own)[0] else least)[2]
    raise ValueError(
        f"{n} x {embedding_dim}: {budget:,} bytes leave no room for codes; try a lower ratio"
    )


def _at_prices(c: _Choice) -> Iterator[tuple[float, list[Tier]]]:
    """Error and tiers at each price of a byte that is tried and at which they fit."""
    low, high = 1e-12 * c.mass[-1] / c.budget, 1e6 * c.mass[-1] / c.budget
    price = high
    while high > 1.03 * low:
        error, taken, tiers = _at_price(c, price)
        if taken <= c.budget:
            high = price
            yield error, tiers
        elif price == high:
            return
        else:
            low = price
        price = math.sqrt(low * high)


def _few(c: _Choice) -> Iterator[tuple[float, list[Tier]]]:
    """Error and tiers of all ones and twos that fit: a small table has too few for the price of a
    byte to find those that use the bytes up."""
    n = c.points[-1]
    for a in c.kinds:
        if n * a.row_bytes + a.fixed_bytes <= c.budget:
            yield c.mass[-1] * a.error, [(n, a.K, a.D)]
    for end, lost in zip(c.points[1:-1], c.mass[1:-1]):
        for a, b in itertools.product(c.kinds, c.last):
            taken = end * a.row_bytes + a.fixed_bytes + (n - end) * b.row_bytes + b.fixed_bytes
            if taken <= c.budget and a is not b:
                error = lost * a.error + (c.mass[-1] - lost) * b.error
                yield error, [(end, a.K, a.D), (n - end, b.K, b.D)]


def _at_price(c: _Choice, price: float) -> tuple[float, int, list[Tier]]:
    """Error, bytes and tiers that cost the least if a byte costs `price`: dynamic programming."""
    count = len(c.points)
    nothing = (math.inf, 0, c.kinds[0])
    best = [[nothing] * (_MOST + 1) for _ in range(count)]  # [end][tiers so far]
    best[0][0] = (0.0, 0, c.kinds[0])
    for end in range(1, count):
        for start in range(end):
            rows, lost = c.points[end] - c.points[start], c.mass[end] - c.mass[start]
            some = c.last if start and end == count - 1 else c.kinds
            costs = [lost * k.error + price * (rows * k.row_bytes + k.fixed_bytes) for k in some]
            least = min(costs)
            kind = some[costs.index(least)]
            for used in range(_MOST):
                cost = best[start][used][0] + least
                if cost < best[end][used + 1][0]:
                    best[end][used + 1] = (cost, start, kind)
    end = count - 1
    used = min(range(_MOST + 1), key=lambda t: best[end][t][0])
    error, taken, tiers = 0.0, 0, []
    while end:
        _, start, kind = best[end][used]
        rows = c.points[end] - c.points[start]
        tiers.append((rows, kind.K, kind.D))
        error += (c.mass[end] - c.mass[start]) * kind.error
        taken += rows * kind.row_bytes + kind.fixed_bytes
        end, used = start, used - 1
    return error, taken, tiers[::-1]


def id_order(n: int, offset: float = 30.0) -> Tensor:
    """How much rows are used if the order of ids is that of use: Zipf's law, as shares (n,)."""
    use = 1 / (torch.arange(n, dtype=torch.float32) + offset)
    return use / use.sum()


def check_tiers(tiers: Any, num_embeddings: int, embedding_dim: int) -> list[Tier]:
    """The tiers as rows, K and D; ValueError for what cannot be."""
    if not isinstance(tiers, (list, tuple)) or not 1 <= len(tiers) <= _MOST_TIERS:
        raise ValueError(f"tiers: give a list of 1 to {_MOST_TIERS} times rows, K and D")
    out: list[Tier] = []
    for tier in tiers:
        whole = isinstance(tier, (list, tuple)) and len(tier) == 3
        if not whole or any(type(x) is not int or x < 1 for x in tier):
            raise ValueError(f"tiers: expected rows, K and D, three numbers, found {tier!r:.60}")
        rows, K, D = tier
        if K > MAX_K or embedding_dim % D or (K == 1 and D > 1):
            raise ValueError(
                f"tiers: K={K}, D={D}: K is at most {MAX_K}, D divides {embedding_dim}, and is 1 "
                "where K is 1"
            )
        out.append((rows, K, D))
    found = sum(rows for rows, _, _ in out)
    if found != num_embeddings:
        raise ValueError(f"tiers: they have {found} rows, the table {num_embeddings}")
    return out
