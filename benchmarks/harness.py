"""What the benchmarks share: one thread, a steady allocator, interleaved rounds, tables, JSON.
Both sides of a ratio run in turn in one process; CPU seconds count, not those of other programs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any, Callable, Iterator

RESULTS = Path(__file__).resolve().parent / "results"

# glibc returns large blocks to the system when they are freed and maps them again, page by page,
# at the next allocation. That costs as much as a lookup itself, now and then, on either side.
STEADY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def steady() -> None:
    """Start this program again with one thread and an allocator that keeps its memory."""
    if any(os.environ.get(name) != value for name, value in STEADY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY})
    import torch

    torch.set_num_threads(1)


def quiet() -> None:
    """No warnings, and no word of fairseq."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


@contextlib.contextmanager
def without_library() -> Iterator[None]:
    """PyTorch alone: forms that look up first in here go on without the library."""
    from fairseq_dpq.native import library

    load, library.load = library.load, lambda: None
    try:
        yield
    finally:
        library.load = load


def interleaved(
    sides: dict[str, Callable[[int], Any]],
    rounds: int,
    warm_up: int = 5,
    repeat: int = 1,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, list[float]]:
    """CPU seconds of each side in each round; the order turns, so that no side always follows the
    same other one. A side is given the number of the round, and called `repeat` times in it."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            for i in range(repeat):
                result = sides[name](number + i)
            taken = (clock() - start) / repeat
            del result
            if number >= 0:
                times[name].append(taken)
    return times


def ratio(times: dict[str, list[float]], side: str, base: str) -> float:
    """Median over median."""
    return statistics.median(times[side]) / statistics.median(times[base])


def peak_memory(code: str, arguments: list[str], **environment: str) -> tuple[str, int]:
    """Run Python code in a process of its own: what it prints, and its peak memory in bytes.

    The allocator is the usual one. VmHWM counts, because a child's ru_maxrss begins with the peak
    of the process that started it.
    """
    report = "import sys; text = open('/proc/self/status').read(); "
    report += "print(text.split('VmHWM:')[1].split()[0], file=sys.stderr)"
    usual = {name: value for name, value in os.environ.items() if "MALLOC_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}", *arguments],
        env={**usual, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout, int(done.stderr.split()[-1]) * 1024


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join(cells).rstrip())


def verdict(value: float, limit: float | None) -> str:
    """The limit of a figure and whether it holds."""
    if limit is None:
        return "-"
    return f"<= {limit:.2f}" + ("" if value <= limit else "  MISSED")


def write(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write results/NAME.json, whole or not at all."""
    import torch

    RESULTS.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        **more,
        "rows": rows,
    }
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    print(f"load average {record['load']:.1f}; written to {path.parent.name}/{path.name}")
