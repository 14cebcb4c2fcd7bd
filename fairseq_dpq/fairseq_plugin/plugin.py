"""Registers everything with fairseq: what `--user-dir fairseq_dpq` does, and an import of fairseq
after this package. A program that never imports it pays nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Iterator, Sequence


def register() -> None:
    """Apply the patches, register options and classes, attach the hooks; safe to call again."""
    with same_logging():
        from fairseq_dpq.fairseq_plugin import compat, hooks, options

        compat.apply()
        import fairseq_dpq.fairseq_plugin.optim
        import fairseq_dpq.fairseq_plugin.tasks  # noqa: F401

        options.add_to_all_tasks()
        hooks.attach()
    _say_errors_plainly()


def _say_errors_plainly() -> None:
    """Report an invalid option in one line instead of fairseq's traceback."""
    from fairseq_dpq.files.errors import DPQConfigError, printable

    old = sys.excepthook
    if getattr(old, "_fairseq_dpq", False):
        return

    def hook(kind: Any, error: Any, traceback: Any) -> None:
        if issubclass(kind, DPQConfigError) and not os.environ.get("FAIRSEQ_DPQ_DEBUG"):
            print(f"fairseq_dpq: error: {printable(error)}", file=sys.stderr)
        else:
            old(kind, error, traceback)

    hook._fairseq_dpq = True  # type: ignore[attr-defined]
    sys.excepthook = hook


@contextlib.contextmanager
def same_logging() -> Iterator[None]:
    """Keep the root logger unchanged: a module that fairseq imports calls `basicConfig`, which
    would print the debug messages of a program to its stderr."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


# Waiting for an import ----------------------------------------------------------------------------


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
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if module.__name__ == self.awaited and self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        loader.exec_module = exec_module


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` now if the module is loaded, else right after its import."""
    if sys.modules.get(name) is not None:
        then()
    elif not any(isinstance(f, _Watcher) and f.awaited == name for f in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, then))
