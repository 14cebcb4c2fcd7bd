"""Streaming text: cleaning lines, reading parallel files in chunks, mapping over processes.

Only a few chunks of text are in memory at a time.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence, TypeVar

from experiments.datasets import PrepareError

CHUNK = 5_000  # lines; a few per worker are in memory, and there may be many workers
_Item = TypeVar("_Item")
_Out = TypeVar("_Out")

# Control characters other than white space, zero-width no-break space, and surrogates.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufeff\ud800-\udfff]")


def clean(line: str) -> str:
    """One line of text without control characters, with each run of white space as one space.

    Python's white space includes line breaks such as U+0085 and U+2028. Some readers would split
    the line there and misalign the two sides of a corpus.
    """
    return " ".join(_CONTROL.sub("", line).split())


def _start_worker(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole process group, but only the parent should report it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if initializer is not None:
        initializer(*initargs)


@contextlib.contextmanager
def worker_pool(
    workers: int,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
) -> Iterator[ProcessPoolExecutor]:
    """Processes that are stopped immediately if the parent is interrupted or fails."""
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(initializer, initargs))
    try:
        yield pool
    except BaseException as error:
        # Without this, leaving the pool would wait for work that is no longer needed.
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise PrepareError(
                "a worker process was killed (out of memory?); lower --workers"
            ) from error
        raise
    finally:
        pool.shutdown(wait=True)


def ordered_map(
    function: Callable[[_Item], _Out],
    items: Iterable[_Item],
    workers: int,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
) -> Iterator[_Out]:
    """map() over processes, results in order, with only a few items read ahead."""
    if workers <= 1:
        if initializer is not None:
            initializer(*initargs)
        yield from map(function, items)
        return
    with worker_pool(workers, initializer, initargs) as pool:
        waiting: deque[Future[_Out]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class LineWriter(contextlib.ExitStack):
    """Writes lines side by side to PREFIX.ENDING; after `size` of them to PREFIX1.ENDING, ..."""

    def __init__(self, prefix: Path, endings: Sequence[str], size: int = 0) -> None:
        super().__init__()
        self.prefix, self.endings, self.size = prefix, endings, size
        self.shards: list[Path] = []  # their prefixes
        self._open()

    def write(self, *lines: str) -> None:
        """A line for each ending, without its line feed."""
        if self.size and self._lines == self.size:
            self.close()
            self._open()
        for stream, line in zip(self._streams, lines):
            stream.write(line + "\n")
        self._lines += 1

    def _open(self) -> None:
        self.shards.append(self.prefix.with_name(f"{self.prefix.name}{len(self.shards) or ''}"))
        paths = [f"{self.shards[-1]}.{ending}" for ending in self.endings]
        self._lines = 0
        opened = (open(p, "w", encoding="utf-8", newline="\n") for p in paths)  # noqa: SIM115
        self._streams = [self.enter_context(stream) for stream in opened]
