"""The live table of a list of jobs: what runs, what is done, and the time that remains."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import Sequence, TextIO

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"


@dataclass
class Row:
    """One job as the table shows it."""

    name: str
    state: str = WAITING
    share: float = 0.0  # of it that is done
    first_share: float = 0.0  # what was done before this time
    note: str = ""


def clock(seconds: float | None) -> str:
    """h:mm:ss, or m:ss."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def remaining(rows: Sequence[Row], elapsed: float) -> float | None:
    """Seconds to the end, at the speed so far; None until there is one. Failed runs take no more
    time, and those that were done before count on neither side."""
    done = sum(row.share - row.first_share for row in rows if row.state in (RUNNING, DONE))
    left = sum(1 - row.share for row in rows if row.state in (WAITING, RUNNING))
    return elapsed * left / done if done > 0.02 else None


class Live:
    """Draws the rows: a table that is redrawn on a terminal, lines elsewhere."""

    def __init__(
        self, rows: Sequence[Row], stream: TextIO | None = None, every: float = 60
    ) -> None:
        self.rows = rows
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every = every
        self._start = time.monotonic()
        self._last = self._start
        self._drawn = 0

    def summary(self) -> str:
        """One line: counts and times."""
        count = {state: sum(row.state == state for row in self.rows) for state in _STATES}
        elapsed = time.monotonic() - self._start
        text = f"{count[DONE]} of {len(self.rows)} done"
        if count[FAILED]:
            text += f", {count[FAILED]} failed"
        if count[RUNNING]:
            text += f", {count[RUNNING]} running"
        left = clock(remaining(self.rows, elapsed))
        return f"{text}; {clock(elapsed)} so far, about {left} to go"

    def lines(self, height: int) -> list[str]:
        """The table: what runs, then what ended, the latest first."""
        running = [row for row in self.rows if row.state == RUNNING]
        ended = [row for row in self.rows if row.state in (DONE, FAILED)]
        shown = [*running, *ended[::-1]][: max(1, height - 2)]
        width = max((len(row.name) for row in shown), default=0)
        out = []
        for row in shown:
            bar = "#" * int(20 * row.share)
            out.append(
                f"{row.name.ljust(width)}  [{bar.ljust(20, '.')}] {row.share:4.0%}  "
                f"{row.state:7}  {row.note}"
            )
        return [*out, self.summary()]

    def draw(self) -> None:
        """Redraw on a terminal; elsewhere a summary now and then."""
        if not self._terminal:
            if time.monotonic() - self._last >= self._every:
                self._last = time.monotonic()
                running = [f"{r.name} {r.share:.0%}" for r in self.rows if r.state == RUNNING]
                print("; ".join([self.summary(), *running]), file=self._stream, flush=True)
            return
        size = shutil.get_terminal_size()
        lines = [line[: size.columns - 1] for line in self.lines(size.lines)]
        self._clear()
        print("\n".join(lines), file=self._stream, flush=True)
        self._drawn = len(lines)

    def say(self, text: str) -> None:
        """A line that stays, above the table."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}A\x1b[J", end="", file=self._stream)
            self._drawn = 0


_STATES = (WAITING, RUNNING, DONE, FAILED)
