"""Which K and D are possible, which are taken where none is given, and what to try instead."""

from __future__ import annotations

import math

MAX_K = 1 << 15  # a code is held in at most two bytes, as int16
MAX_DIM = 1 << 20  # far above any embedding; what a file claims beyond it is damage
_SEARCHED = 1 << 32  # sizes up to here are searched for all their divisors
DEFAULT_K = 32


def default_D(dim: int, close: bool = False) -> int:
    """D where none is given: a quarter of the embedding size, or with `close` half of it, where
    rows must come closer to those of a full table: an output layer shares them, or they are
    quantised without training. If that is no divisor, the nearest one by ratio; of two, the larger
    one, which gives the better embeddings. docs/quality.md has the study behind it."""
    wanted = max(1, dim // (2 if close else 4))
    near = near_divisors(dim, wanted) or [1]
    return max(near, key=lambda D: (-abs(math.log(D / wanted)), D))


def division_problem(D: int, dim: int) -> str:
    """What to try if D does not divide an embedding size; empty if it does."""
    if dim >= 1 and dim % D == 0:
        return ""
    return "try " + (" or ".join(map(str, near_divisors(dim, D))) or "a positive size")


def bits_note(K: int) -> str:
    """What a K that is not a power of two costs; empty for one that is."""
    bits = (K - 1).bit_length()
    if 1 << bits == K:
        return ""
    return (
        f"K={K} takes {bits} bits a code, as K={1 << bits} does; K={1 << bits - 1} takes {bits - 1}"
    )


def compact_bytes(n: int, d: int, K: int, D: int, shared: bool = False) -> int:
    """Bytes of a compact table: codes packed into whole bytes a row, and 32-bit values."""
    row = max(1, -(-D * (K - 1).bit_length() // 8))
    return n * row + 4 * K * (d // D if shared else d)


def near_divisors(number: int, wanted: int) -> list[int]:
    """The two divisors of a number that are nearest to `wanted` by ratio."""
    if number < 1:
        return []
    small = [x for x in range(1, math.isqrt(min(number, _SEARCHED)) + 1) if number % x == 0]
    divisors = {*small, *(number // x for x in small)}
    near = sorted(divisors, key=lambda x: (abs(math.log(x / wanted)), x))
    return sorted(near[:2])
