"""Progress bars on a terminal, for work on large tables."""

from __future__ import annotations

from typing import Any, Callable

_LARGE = 50_000  # rows from which a bar is worth its line


def bar(what: str, total: int, least: int = _LARGE) -> Any:
    """A bar of tqdm, to use in `with`; silent below `least` and where stderr is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit_scale=True, disable=None if total >= least else True)


def steps(what: str, total: int) -> Callable[[int], Any]:
    """A bar for slow steps, few as they may be, as the functions of `compress` take it."""
    return bar(what, total, 1).update
