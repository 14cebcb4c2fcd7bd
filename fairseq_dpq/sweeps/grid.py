"""The points of a sweep: one training run each, and the full table they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from fairseq_dpq.config import flag
from fairseq_dpq.methods import METHODS
from fairseq_dpq.methods.keyed import KeyedMethod
from fairseq_dpq.runs.folder import RunsError
from fairseq_dpq.sizes import MAX_K

METHODS_WITH_CODES = [name for name, method in METHODS.items() if method.has_codes]
# The default; the others are baselines, some of which need files.
DPQ_METHODS = [name for name, method in METHODS.items() if isinstance(method, KeyedMethod)]


@dataclass(frozen=True)
class Point:
    """One run. Without a method it is the full table."""

    method: str | None = None
    K: int = 0
    D: int = 0
    shared: bool = False

    @property
    def name(self) -> str:
        """The run's folder and its name in tables."""
        if self.method is None:
            return "full"
        return f"{self.method}-K{self.K}-D{self.D}" + ("-shared" if self.shared else "")

    def flags(self) -> list[str]:
        """Its flags of fairseq-train."""
        if self.method is None:
            return []
        words = [flag("K"), str(self.K), flag("D"), str(self.D), flag("method"), self.method]
        return [*words, flag("share_subspaces")] if self.shared else words


FULL = Point()


@dataclass(frozen=True)
class Grid:
    """The values of each axis; every combination is a point."""

    K: tuple[int, ...]
    D: tuple[int, ...]
    methods: tuple[str, ...]
    shared: tuple[bool, ...] = (False,)
    full: bool = True

    def points(self) -> list[Point]:
        """The full table first, then the cheapest points: an early stop leaves a whole picture of
        small sizes."""
        out = [
            Point(method, K, D, shared)
            for K in self.K
            for D in self.D
            for shared in self.shared
            for method in self.methods
        ]
        out.sort(key=lambda p: p.K * p.D)
        return [FULL, *out] if self.full else out


def make_grid(
    K: Sequence[int],
    D: Sequence[int],
    methods: Sequence[str],
    shared: Sequence[bool],
    full: bool,
) -> Grid:
    """A checked grid, each value once and in order."""
    for value in K:
        if not 2 <= value <= MAX_K:
            raise RunsError(f"{flag('K')} {value}: must be from 2 to {MAX_K}; try 32")
    for value in D:
        if value < 1:
            raise RunsError(f"{flag('D')} {value}: must be 1 or more; try 16")
    for name in methods:
        if name not in METHODS_WITH_CODES:
            raise RunsError(
                f"{flag('method')} {name}: choose one of {', '.join(METHODS_WITH_CODES)}"
            )
    return Grid(
        tuple(sorted(set(K))),
        tuple(sorted(set(D))),
        tuple(dict.fromkeys(methods)),
        tuple(sorted(set(shared))),
        full,
    )
