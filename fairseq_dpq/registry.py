"""Names of methods and forms: those of this package, and those that other packages add.

A package adds its own through the entry-point group `fairseq_dpq`: each entry names a module, which
is imported before anything is looked up here, and which calls `register_method` or `register_form`.
"""

from __future__ import annotations

import inspect
import warnings
from importlib import metadata
from typing import Any, Collection, Iterable, Iterator, Mapping, TypeVar

GROUP = "fairseq_dpq"
T = TypeVar("T")
_loaded = False


def extensions() -> Iterable[Any]:
    """The entry points of other packages."""
    return metadata.entry_points(group=GROUP)


def load_extensions() -> None:
    """Import what other packages declare, once; one that fails is named in a warning."""
    global _loaded
    if _loaded:
        return
    _loaded = True  # first, because those modules look names up themselves
    for entry in extensions():
        try:
            entry.load()
        except Exception as error:  # another package's module can fail in any way
            warnings.warn(f"fairseq_dpq: cannot load {entry.value}: {error}", stacklevel=2)


class Registry(Mapping[str, T]):
    """What is registered, by name, in order."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> None:
        """Register a new name."""
        if name in self._items:
            raise ValueError(f"there is already a {self.what} called {name!r}")
        self._items[name] = item

    def __getitem__(self, name: str) -> T:
        load_extensions()
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        load_extensions()
        return iter(self._items)

    def __len__(self) -> int:
        load_extensions()
        return len(self._items)


def check_complete(cls: type, base: type, optional: Collection[str] = ()) -> None:
    """Raise TypeError for a class that lacks what its base class leaves open: attributes without a
    value, and functions that raise NotImplementedError."""
    missing = [name for name in base.__annotations__ if not hasattr(cls, name)]
    for name in dir(base):
        found = inspect.getattr_static(base, name)
        function = getattr(found, "fget", None) or getattr(found, "__func__", found)
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        if "NotImplementedError" in names and inspect.getattr_static(cls, name) is found:
            missing.append(name)
    missing = [name for name in missing if name not in optional]
    if missing:
        raise TypeError(f"{base.__name__.lower()} {cls.__name__} lacks {', '.join(missing)}")
