"""Registers the plugin when a program imports fairseq after this package. A program that never
imports fairseq pays nothing."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Sequence


class _Watcher(MetaPathFinder):
    """Finds fairseq by the other finders, and calls `then` once it is loaded."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "fairseq":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.then)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.loader  # type: ignore[union-attr]
        self.loader.exec_module(module)
        self.then()


def when_fairseq_is_imported(then: Callable[[], None]) -> None:
    """Call `then` now if fairseq is loaded, else right after its import."""
    if sys.modules.get("fairseq") is not None:
        then()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(then))
