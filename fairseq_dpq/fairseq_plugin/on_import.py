"""Registers with fairseq, or with transformers, when a program imports it after this package. A
program that never does pays nothing."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Sequence


class _Watcher(MetaPathFinder):
    """Finds a module by the other finders, and calls `then` once it is loaded. It stays until then:
    a program may ask whether there is a fairseq without importing it."""

    def __init__(self, awaited: str, then: Callable[[], None]) -> None:
        self.awaited, self.then = awaited, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.awaited:
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.then()


class _Loader(Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.loader  # type: ignore[union-attr]
        self.loader.exec_module(module)
        self.then()


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` now if the module is loaded, else right after its import."""
    if sys.modules.get(name) is not None:
        then()
    elif not any(isinstance(f, _Watcher) and f.awaited == name for f in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, then))
