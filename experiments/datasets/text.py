"""Streams of text: lines of files, chunks of lines, and several processes that work on chunks.

Only a few chunks are in memory at a time.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import signal
import zlib
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Callable, Iterable, Iterator, Sequence, TypeVar

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


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The content of a plain or gzipped file; PrepareError if it ends too early."""
    with open(path, "rb") as disk:
        packed = disk.read(2) == b"\x1f\x8b"
        disk.seek(0)
        try:
            yield gzip.GzipFile(fileobj=disk) if packed else disk  # type: ignore[misc]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise PrepareError(f"{path}: cut short or damaged ({error})") from error


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a plain or gzipped file, split at line feeds alone, which they keep."""
    with open_bytes(path) as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise PrepareError(f"{path}, line {number}: not UTF-8 text ({error})") from error
            yield line


def chunked(items: Iterable[_Item], size: int = CHUNK) -> Iterator[list[_Item]]:
    """Lists of `size` items; the last one may be shorter."""
    stream = iter(items)
    return iter(lambda: list(islice(stream, size)), [])


_function: Any = None  # of a worker process


def _start_worker(function: Any, load: Any, arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole process group, but only the parent should report it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    global _function
    _function = function if load is None else partial(function, load(*arguments))


def _work(item: Any) -> Any:
    return _function(item)


def ordered_map(
    function: Callable[..., _Out],
    items: Iterable[Any],
    workers: int,
    load: Callable[..., Any] | None = None,
    *arguments: Any,
) -> Iterator[_Out]:
    """map() over processes, results in order, with only a few items read ahead. `load(*arguments)`
    is called once in each process, and what it returns comes before the item. The processes are
    stopped immediately if the parent is interrupted or fails."""
    if workers <= 1:
        yield from map(function if load is None else partial(function, load(*arguments)), items)
        return
    setup = (function, load, arguments)
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=setup)
    waiting: deque[Future[_Out]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_work, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
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
