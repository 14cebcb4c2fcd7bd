"""Runs the points of a sweep, some at a time, and keeps one result of each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.checkpoints.errors import CheckpointError
from fairseq_dpq.sweeps import live
from fairseq_dpq.sweeps.commands import CHECKPOINTS, Base, Command
from fairseq_dpq.sweeps.grid import Point
from fairseq_dpq.sweeps.logs import ATTEMPT, RunLog
from fairseq_dpq.sweeps.results import (
    LINES,
    RESULT,
    Result,
    choose_metric,
    measure,
    with_full_sizes,
    write_whole,
)

_GUARD = Path(__file__).with_name("guard.py")
_POLL, _LOOK = 0.2, 2.0  # seconds between looks at processes, and at logs
_USELESS = (
    "the full table's run failed before its first update, so that no other is started: mend the "
    "command, or go on without it (--no-full)"
)
LOG, USAGE = "train.log", "usage.json"


@dataclass
class Running:
    """A run that is going on. Closing `pipe` ends it."""

    point: Point
    row: live.Row
    process: subprocess.Popen[bytes]
    pipe: int
    log: RunLog
    slot: int


class Runner:
    """Runs a sweep in its folder, whose lock the caller holds."""

    def __init__(
        self, out: Path, base: Base, points: Sequence[Point], lock: int, metric: str | None = None
    ) -> None:
        self.out, self.base, self.points, self.lock = out, base, list(points), lock
        self.metric = metric
        self.results: dict[str, Result] = {}
        self.rows = {point.name: live.Row(point.name) for point in points}
        for point in self.points:
            self._take_over(point)

    def folder(self, point: Point) -> Path:
        return self.out / "runs" / point.name

    def command(self, point: Point) -> Command:
        return self.base.command(point, self.folder(point))

    def _take_over(self, point: Point) -> None:
        """What an earlier sweep did: a finished run is kept, a failed one tried again."""
        row, folder = self.rows[point.name], self.folder(point)
        with contextlib.suppress(OSError, ValueError, TypeError):
            result = Result.from_json((folder / RESULT).read_text(encoding="utf-8"))
            if result.done:
                self.results[point.name] = result
                row.state, row.share, row.first_share = live.DONE, 1.0, 1.0
                row.note = "done before"

    def waiting(self) -> list[Point]:
        return [point for point in self.points if point.name not in self.results]

    # -- running ---------------------------------------------------------------------------------

    def run(
        self, workers: int, threads: int, gpus: Sequence[str] = (), limit: int | None = None
    ) -> list[Result]:
        """Run what is not done yet, at most `limit` runs; on any exception, end what runs before it
        is passed on."""
        queue = self.waiting()[:limit]
        running: list[Running] = []
        shown = live.Live(list(self.rows.values()))
        looked = 0.0
        try:
            while queue or running:
                while queue and len(running) < workers:
                    slot = min(set(range(workers)) - {r.slot for r in running})
                    running.append(self._start(queue.pop(0), slot, threads, gpus))
                time.sleep(_POLL)
                for run in [r for r in running if r.process.poll() is not None]:
                    running.remove(run)
                    os.close(run.pipe)
                    result = self._finish(run)
                    shown.say(self._line(result))
                    if run.point.method is None and not (result.done or result.updates):
                        if queue:
                            shown.say(_USELESS)
                        queue.clear()
                if time.monotonic() - looked >= _LOOK:
                    looked = time.monotonic()
                    for run in running:
                        self._look(run)
                    shown.draw()
        finally:
            for run in running:
                os.close(run.pipe)
            for run in running:
                run.process.wait()
        self._write_lines()
        return self.ordered()

    def _start(self, point: Point, slot: int, threads: int, gpus: Sequence[str]) -> Running:
        folder, command = self.folder(point), self.command(point)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RESULT, USAGE):
            (folder / name).unlink(missing_ok=True)
        write_whole(folder / "command.txt", command.text() + "\n")
        log = RunLog(folder / LOG)
        log.read()
        row = self.rows[point.name]
        row.state, row.share = live.RUNNING, log.progress()
        row.first_share = row.share
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            **command.environment,
        }
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        read, write = os.pipe()
        with (folder / LOG).open("ab") as file:
            file.write(f"{ATTEMPT} {log.attempts + 1}\n".encode())
            file.flush()
            process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(folder / USAGE), *command.words],
                stdin=read,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a group of its own, which the guard may kill
                pass_fds=(self.lock,),
            )
        os.close(read)
        return Running(point, row, process, write, log, slot)

    def _look(self, run: Running) -> None:
        run.log.read()
        run.row.share = max(run.row.share, run.log.progress())
        if run.log.valid:
            run.row.note = self._scores(run.log.best())

    def _finish(self, run: Running) -> Result:
        run.log.read()
        point, folder, log = run.point, self.folder(run.point), run.log
        usage: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            usage = json.loads((folder / USAGE).read_text(encoding="utf-8"))
        result = Result(
            point.name,
            point.method,
            point.K,
            point.D,
            point.shared,
            updates=log.updates,
            attempts=log.attempts,
            seconds=usage.get("seconds"),
            cpu_seconds=usage.get("cpu_seconds"),
            peak_bytes=usage.get("peak_bytes"),
            gpu_gb_free=log.gpu_gb_free,
            command=self.command(point).text(),
        )
        code = run.process.returncode
        if code != 0:
            result.status, result.error = live.FAILED, f"exit code {code}: {log.tail()}"
        elif not log.valid:
            result.status, result.error = live.FAILED, "it ended without a validation"
        else:
            try:
                sizes, warmup = measure(folder / CHECKPOINTS)
                for name, value in sizes.items():
                    setattr(result, name, value)
                # During the warm-up a validation is one of a full table.
                result.scores = log.best(after=warmup)
            except CheckpointError as error:
                result.status, result.error = live.FAILED, str(error)
        run.row.state, run.row.share = result.status, 1.0 if result.done else run.row.share
        run.row.note = self._scores(result.scores) or result.error
        self.results[point.name] = result
        write_whole(folder / RESULT, result.to_json() + "\n")
        self._write_lines()
        return result

    # -- what is kept and shown ------------------------------------------------------------------

    def ordered(self) -> list[Result]:
        found = [self.results[p.name] for p in self.points if p.name in self.results]
        return with_full_sizes(found)

    def _write_lines(self) -> None:
        text = "".join(result.to_json() + "\n" for result in self.ordered())
        write_whole(self.out / LINES, text)

    def _scores(self, scores: dict[str, float]) -> str:
        if not scores:
            return ""
        metric = self.metric or choose_metric([Result("", scores=scores)], None)
        return f"{metric} {scores[metric]:g}" if metric in scores else f"no valid_{metric}"

    def _line(self, result: Result) -> str:
        if not result.done:
            log = self.out / "runs" / result.name / LOG
            return f"{result.name}: FAILED, {result.error} (log: {log})"
        ratio = "" if result.ratio is None else f", ratio {result.ratio:.1f}"
        spent = "" if result.seconds is None else f", {live.clock(result.seconds)}"
        return f"{result.name}: {self._scores(result.scores)}{ratio}{spent}"
