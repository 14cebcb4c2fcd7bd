"""How a function or class of fairseq is replaced, at most once: by the patches of `compat.py` and
`workers.py`, and by the hooks of `hooks.py`. No other module assigns anything into fairseq."""

from __future__ import annotations

import functools
from typing import Any, Callable

MARK = "_fairseq_dpq_compat"


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
    """Replace `owner.name` by `make(old)`, once; return whether this call did it."""
    old = getattr(owner, name)
    if getattr(old, MARK, False):
        return False
    new = make(old)
    setattr(new, MARK, True)
    setattr(owner, name, new)
    return True


def around(owner: Any, name: str, function: Callable) -> bool:
    """Replace the function or method `owner.name` by one that calls `function(old, ...)`, once;
    return whether this call did it."""

    def make(old: Any) -> Any:
        @functools.wraps(old)
        def new(*args: Any, **kwargs: Any) -> Any:
            return function(old, *args, **kwargs)

        return new

    return replace(owner, name, make)
