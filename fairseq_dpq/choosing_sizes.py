"""Which K and D to take: what each pair stores, which of them reach a size, and which of those keep
most of a trained table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Iterable, Sequence

import torch
from torch import Tensor

from fairseq_dpq.config import flag
from fairseq_dpq.files.progress import bar
from fairseq_dpq.forms.packing import code_bits, row_bytes
from fairseq_dpq.forms.quantization import fit_error

ROWS = 8192  # sampled of a table
_FEWEST = 8  # rows for each code, or k-means only repeats the rows
_LARGEST_K = 512
_CLOSE = 1.1  # errors that differ by less than this factor are the same
RATIOS = (10, 20, 50, 100, 200)  # where no target is given


@dataclass(frozen=True)
class Choice:
    """One K and D, what it stores, and what is known of its quality."""

    K: int
    D: int
    shared: bool
    bytes: int
    ratio: float
    error: float | None = None  # squared, as a share of the sampled rows' squared norm
    measured: float | None = None  # the score in a sweep; lower is better
    score: str | None = None  # the same in words
    reason: str = ""

    @property
    def bits(self) -> int:
        """Bits of a symbol."""
        return self.D * code_bits(self.K)

    def flags(self) -> str:
        """To paste into a command."""
        words = f"{flag('K')} {self.K} {flag('D')} {self.D}"
        return f"{words} {flag('share_subspaces')}" if self.shared else words


def compact_bytes(n: int, d: int, K: int, D: int, shared: bool = False) -> int:
    """Bytes of a compact table: packed codes and 32-bit values."""
    values = 4 * K * (d // D if shared else d)
    return n * row_bytes([code_bits(K)] * D) + values


def all_choices(
    tables: Sequence[tuple[int, int]], sharing: Sequence[bool] = (False, True)
) -> list[Choice]:
    """Every K (a power of two) and D (a divisor of every embedding size) for some tables (n, d)."""
    full = sum(4 * n * d for n, d in tables)
    common = reduce(math.gcd, (d for _, d in tables))
    most = max(2, min(_LARGEST_K, min(n for n, _ in tables) // _FEWEST))
    out = []
    for K in (2**i for i in range(1, most.bit_length())):
        for D in (x for x in range(1, common + 1) if common % x == 0):
            for shared in sharing:
                small = sum(compact_bytes(n, d, K, D, shared) for n, d in tables)
                out.append(Choice(K, D, shared, small, full / small))
    return out


def reaching(choices: Sequence[Choice], most_bytes: float) -> list[Choice]:
    """What fits: of each K, with and without sharing, the largest D, and what a sweep measured."""
    fits = [choice for choice in choices if choice.bytes <= most_bytes]
    largest = {(c.K, c.shared): c for c in sorted(fits, key=lambda c: c.D)}
    known = sorted((c for c in fits if c.measured is not None), key=lambda c: -c.bytes)
    # What leaves half of the room unused says little, unless nothing larger was measured.
    known = [c for c in known if c.bytes >= most_bytes / 2] or known[:1]
    return list(dict.fromkeys([*largest.values(), *known]))


def sample(table: Tensor, seed: int = 0) -> Tensor:
    """Some rows of a table in float32; rows of zeros, such as padding, are left out."""
    real = table[table.abs().amax(1) > 0] if len(table) else table
    if len(real) > ROWS:
        keep = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed))[:ROWS]
        real = real[keep]
    return real.float()


def with_errors(choices: Iterable[Choice], samples: Sequence[Tensor]) -> dict[Choice, Choice]:
    """Each choice with its error over all sampled tables."""
    norms = [float(rows.double().pow(2).sum()) for rows in samples]
    out = {c: c for c in choices}
    with bar("k-means", len(out), 1) as done:
        for c in out:
            errors = (fit_error(rows, c.K, c.D, c.shared) for rows in samples)
            lost = sum(error * norm for error, norm in zip(errors, norms))
            out[c] = replace(c, error=lost / max(sum(norms), 1e-300))
            done.update(1)
    return out


def ranked(choices: Sequence[Choice]) -> list[Choice]:
    """The best first: what a sweep measured, by its score; then by error, in steps of a tenth above
    the smallest, or, where there is no table yet, by bits of a symbol in the same way; then small
    K, which learns better than its error says and costs less (figures 3 and 4 of the paper)."""
    least = max(min((c.error for c in choices if c.error is not None), default=0.0), 1e-9)
    most = max((c.bits for c in choices), default=1)

    def key(c: Choice) -> tuple[float, ...]:
        above = most / c.bits if c.error is None else max(c.error, least) / least
        step = int(math.log(above) / math.log(_CLOSE))
        return c.measured is None, c.measured or 0.0, step, c.K, c.shared, -c.D

    best = sorted(choices, key=key)
    return [replace(c, reason=_reason(c, c is best[0], least)) for c in best]


def _reason(c: Choice, first: bool, least: float) -> str:
    """One line: why it is where it is."""
    bits = code_bits(c.K)
    codes = f"{c.D} codes of {bits} bit{'s' if bits > 1 else ''}"
    if c.score is not None:
        return f"{'best' if first else 'measured'} in the sweep: {c.score}"
    if c.error is not None:
        times = c.error / least
        if times < 1.005:
            return f"{codes}: the smallest error of k-means"
        small = "small K, " if first else ""
        return f"{codes}: {small}{100 * (times - 1):.0f} % more error than the smallest"
    if first:
        return f"{codes}: small K and large D learn best and cost least"
    return codes
