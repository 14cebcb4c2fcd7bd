"""What the demo shows while it runs: a progress bar with the current losses on a terminal, an
occasional line elsewhere (a log file, continuous integration)."""

from __future__ import annotations

import shutil
import sys
import threading
import time


class Status:
    """Progress of several jobs at once. Jobs report from their threads; one thread draws."""

    def __init__(self, work: dict[str, float], every: float = 15.0) -> None:
        """``work``: the expected seconds of each job, as weights of the bar."""
        self._work = dict(work)
        self._done = dict.fromkeys(work, 0.0)
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._every = every
        self._last = self._start
        self._terminal = sys.stdout.isatty()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def report(self, job: str, fraction: float, note: str = "") -> None:
        """Set the progress of a job (0 to 1; at 1 it is removed from the line)."""
        with self._lock:
            self._done[job] = max(self._done[job], min(fraction, 1.0))
            if note and fraction < 1:
                self._notes[job] = note
            else:
                self._notes.pop(job, None)

    def line(self) -> str:
        """The bar, the share of the work that is done, and a note of every running job."""
        with self._lock:
            done = sum(self._work[job] * self._done[job] for job in self._work)
            share = done / sum(self._work.values())
            notes = " | ".join(self._notes[job] for job in self._work if job in self._notes)
        filled = int(24 * share)
        clock = f"{int(self.seconds) // 60}:{int(self.seconds) % 60:02d}"
        return f"[{'#' * filled}{'.' * (24 - filled)}] {share:4.0%} {clock}  {notes}"

    def draw(self) -> None:
        """Show the line: at once on a terminal, at most every ``every`` seconds elsewhere."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + self.line()[:width].ljust(width), end="", flush=True)
        elif time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            print(self.line(), flush=True)

    def say(self, text: str) -> None:
        """Print a separate line above the bar."""
        if self._terminal:
            print("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r", end="")
        print(text, flush=True)
