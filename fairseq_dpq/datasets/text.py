"""Streaming text: cleaning of lines, parallel files in chunks, work spread over processes.

Nothing here holds more than a few chunks of text in memory.
"""

from __future__ import annotations

import re
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, TypeVar

from fairseq_dpq.datasets.errors import PrepareError

CHUNK = 20_000  # lines
_Item = TypeVar("_Item")
_Out = TypeVar("_Out")

# Control characters other than white space, zero-width no-break space, and surrogates.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufeff\ud800-\udfff]")


def clean(line: str) -> str:
    """One line of text: control characters dropped, any run of white space one space.

    Python's idea of white space holds line breaks such as U+0085 and U+2028, on which some
    readers would split the line and so shift one side of a corpus against the other.
    """
    return " ".join(_CONTROL.sub("", line).split())


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
    pool = ProcessPoolExecutor(workers, initializer=initializer, initargs=initargs)
    waiting: deque[Future[_Out]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise PrepareError("a worker process was killed (out of memory?); lower --workers") from (
            error
        )
    finally:
        for future in waiting:
            future.cancel()
        pool.shutdown(wait=True)


def parallel_chunks(
    paths: tuple[Path, Path], size: int = CHUNK
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Lines of two files side by side; PrepareError if one of them is longer."""
    done = 0
    # Binary files break lines at LF alone.
    with open(paths[0], "rb") as first, open(paths[1], "rb") as second:
        while True:
            left, right = list(islice(first, size)), list(islice(second, size))
            if len(left) != len(right):
                lines = [done + len(left), done + len(right)]
                lines[0] += sum(1 for _ in first)
                lines[1] += sum(1 for _ in second)
                raise PrepareError(
                    f"{paths[0]} has {lines[0]} lines, {paths[1]} has {lines[1]}: not parallel"
                )
            if not left:
                return
            done += len(left)
            yield left, right


def count_lines(path: Path) -> int:
    """Line feeds in a file, and one more if the last line lacks it."""
    lines, last = 0, b"\n"
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")
