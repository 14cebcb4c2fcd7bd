"""How a patch replaces a function or class of fairseq, at most once."""

from __future__ import annotations

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
