"""Runs jobs, lists of commands, some at a time, and keeps one result of each.

A job that was broken off goes on with the command that was not done; a finished one is not run
again. However the runner ends, SIGKILL included, its commands end too (guard.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

from tqdm import tqdm

from fairseq_dpq.files.errors import CheckpointError, printable
from fairseq_dpq.runs.folder import RunsError, read_json, write_json
from fairseq_dpq.runs.logs import ATTEMPT, RunLog

_GUARD = Path(__file__).with_name("guard.py")
_POLL, _LOOK = 0.1, 2.0  # seconds between looks at processes, and at logs
RESULT = "result.json"
RUNNING, DONE, FAILED = "running", "done", "failed"
Facts = Dict[str, Any]


@dataclass
class Step:
    """One command. Its output goes to NAME.log in the job's folder; what a command with `json`
    prints to standard output goes to NAME.json."""

    name: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    json: bool = False
    resumes: bool = False  # run again, it goes on where it was broken off
    fresh: tuple[Path, ...] = ()  # what an unfinished run of it may have left: removed before it
    weight: float = 1.0  # its share of the job's time, for the progress bar

    def __str__(self) -> str:
        """As one could type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass
class Job:
    """Commands in order, and what their result is.

    `finish` gets the job and the facts of its steps, and returns what result.json holds besides. If
    it raises RunsError or CheckpointError, the job has failed. `after` names jobs that must be done
    before.
    """

    name: str
    folder: Path
    steps: list[Step]
    finish: Callable[[Job, list[Facts]], Facts] = lambda job, steps: {}
    after: tuple[str, ...] = ()

    def commands(self) -> list[str]:
        return [str(step) for step in self.steps]

    def state(self) -> Facts:
        """What result.json says; empty if there is none, or if it is damaged."""
        found = read_json(self.folder / RESULT) or {}
        return found if isinstance(found.get("steps"), list) else {}

    def done(self) -> Facts | None:
        """The result of a job that is complete."""
        found = self.state()
        return found if found.get("status") == DONE else None

    def output(self, step: str) -> Facts:
        """The JSON that a step printed."""
        found = read_json(self.folder / f"{step}.json")
        if found is None:
            raise RunsError(f"{step} printed no JSON: {self.folder / f'{step}.json'}")
        return found


@dataclass
class _Running:
    """A job that is going on. Closing its standard input ends its command."""

    job: Job
    slot: int
    environment: dict[str, str]
    facts: list[Facts]  # of the steps that are done
    process: subprocess.Popen[bytes]
    log: RunLog

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> int:
        """Wait for its end; the exit code. The guard's lock is of no use then."""
        code = self.process.wait()
        (self.job.folder / ".running").unlink(missing_ok=True)
        return code

    @property
    def step(self) -> Step:
        return self.job.steps[len(self.facts)]

    def share(self) -> float:
        """The share of the job that is done."""
        weights = [step.weight for step in self.job.steps]
        done = sum(weights[: len(self.facts)])
        return (done + weights[len(self.facts)] * self.log.progress()) / sum(weights)


class _Progress:
    """How far all jobs are, and those that run, with the time that remains: bars on a terminal, a
    line every so many seconds elsewhere."""

    def __init__(self, total: int, done: int, every: float) -> None:
        self._terminal, self._every = sys.stderr.isatty(), every
        self._file = sys.stderr if self._terminal else io.StringIO()
        self._all = self._bar(total, done, f"{total} runs")
        self._running: dict[str, Any] = {}
        self._looked = self._printed = time.monotonic()

    def _bar(self, total: int, done: float, name: str, leave: bool = True) -> Any:
        form = "{l_bar}{bar}| {elapsed} so far, about {remaining} to go{postfix}"
        options: Any = {"desc": name, "leave": leave, "file": self._file, "bar_format": form}
        return tqdm(total=total, initial=done, smoothing=0, **options)

    def look(self, ended: int, running: Sequence[_Running]) -> None:
        """Read the logs and redraw, now and then."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        for run in running:
            run.log.read()
            name, share = run.job.name, run.share()
            if name not in self._running:
                self._running[name] = self._bar(1, share, name, leave=False)
                self._all.initial += share  # what was done before takes no time now
            bar, loss = self._running[name], run.log.loss
            bar.n = max(bar.n, share)
            bar.set_postfix_str(run.step.name if loss is None else f"loss {loss:g}")
        for name in self._running.keys() - {run.job.name for run in running}:
            self._running.pop(name).close()
        self._all.n = ended + sum(bar.n for bar in self._running.values())
        self._all.refresh()
        if not self._terminal and self._looked - self._printed >= self._every:
            self._printed = self._looked
            print("; ".join(map(str, [self._all, *self._running.values()])), file=sys.stderr)

    def say(self, text: str) -> None:
        """A line that stays."""
        tqdm.write(text, file=sys.stderr)

    def close(self, ended: int) -> None:
        self._all.n = ended
        for bar in [*self._running.values(), self._all]:
            bar.close()


class Runner:
    """Runs jobs in folders whose lock the caller holds."""

    def __init__(
        self,
        jobs: Sequence[Job],
        line: Callable[[Facts], str] = lambda result: "done",
        every: float = 60.0,
    ) -> None:
        """`line` words a result; `every` so many seconds the progress is printed where there is no
        terminal."""
        self.jobs, self.line, self.every = list(jobs), line, every
        found = {job.name: job.done() for job in self.jobs}
        self.results: dict[str, Facts] = {n: facts for n, facts in found.items() if facts}

    def waiting(self) -> list[Job]:
        return [job for job in self.jobs if job.name not in self.results]

    def run(
        self,
        workers: int = 1,
        threads: int | None = None,
        gpus: Sequence[str] = (),
        limit: int | None = None,
        go_on: Callable[[Facts], str] = lambda result: "",
    ) -> dict[str, Facts]:
        """Run what is not done yet, at most `limit` jobs; on any exception, end what runs before it
        is passed on. If `go_on` has something to say about a result, no further job is started."""
        queue = self.waiting()[:limit]
        running: list[_Running] = []
        progress = _Progress(len(self.jobs), len(self.results), self.every)
        try:
            while queue or running:
                for job in self._ready(queue)[: workers - len(running)]:
                    slot = min(set(range(workers)) - {r.slot for r in running})
                    environment = {"PYTHONUNBUFFERED": "1"}
                    if threads is not None:
                        environment["OMP_NUM_THREADS"] = str(threads)
                    if gpus:
                        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
                    queue.remove(job)
                    running.append(self._start(job, slot, environment))
                if not running:  # what the others wait for has failed
                    break
                time.sleep(_POLL)
                for run in [r for r in running if r.process.poll() is not None]:
                    if self._next_step(run):
                        continue
                    running.remove(run)
                    result = self.results[run.job.name]
                    failed = f"FAILED, {result['error']} (logs: {run.job.folder})"
                    said = self.line(result) if result["status"] == DONE else failed
                    progress.say(f"{run.job.name}: {said}")
                    problem = go_on(result)
                    if problem and queue:
                        progress.say(problem)
                        queue.clear()
                progress.look(len(self.results), running)
        finally:
            progress.close(len(self.results))
            for run in running:
                run.close()
            for run in running:
                run.wait()
        return self.results

    def _ready(self, queue: list[Job]) -> list[Job]:
        names = {job.name for job in self.jobs}
        done = {name for name, result in self.results.items() if result["status"] == DONE}
        return [job for job in queue if all(n in done for n in job.after if n in names)]

    def _start(self, job: Job, slot: int, environment: dict[str, str]) -> _Running:
        """Start the first command that is not done."""
        job.folder.mkdir(parents=True, exist_ok=True)
        facts = []
        # The last one runs again if all but the result was there.
        for step, known in zip(job.steps[:-1], job.state().get("steps", [])):
            if not isinstance(known, dict) or known.get("command") != str(step):
                break
            facts.append(known)
        started = self._popen(job, job.steps[len(facts)], environment)
        return _Running(job, slot, environment, facts, *started)

    def _popen(
        self, job: Job, step: Step, environment: dict[str, str]
    ) -> tuple[subprocess.Popen[bytes], RunLog]:
        for path in () if step.resumes else step.fresh:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        (job.folder / "usage.json").unlink(missing_ok=True)
        log = RunLog(job.folder / f"{step.name}.log")
        words = [find_program(step.words[0]), *step.words[1:]]
        with contextlib.ExitStack() as files:
            said = out = files.enter_context(open(log.path, "ab" if step.resumes else "wb"))
            if step.json:
                out = files.enter_context(open(job.folder / f"{step.name}.json", "wb"))
            if step.resumes:
                said.write(f"{ATTEMPT} {log.read().attempts + 1}\n".encode())
                said.flush()
            process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(job.folder.absolute()), *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=said,
                cwd=step.cwd,
                env={**os.environ, **environment, **step.environment},
                start_new_session=True,  # a group of its own, which the guard may kill
            )
        return process, log

    def _next_step(self, run: _Running) -> bool:
        """A command has ended: record it and start the next one; False if the job has ended."""
        run.close()
        run.log.read()
        job, step, code = run.job, run.step, run.wait()
        if code != 0:
            said = run.log.last_line() or "no output"
            self._write(run, FAILED, {"error": f"{step.name}: exit code {code}: {said}"})
            return False
        usage = read_json(job.folder / "usage.json") or {}
        facts = {"name": step.name, "command": str(step), "attempts": max(run.log.attempts, 1)}
        facts.update({key: usage.get(key) for key in ("seconds", "cpu_seconds", "peak_bytes")})
        run.facts.append(facts)
        if len(run.facts) < len(job.steps):
            self._write(run, RUNNING, {})
            run.process, run.log = self._popen(job, run.step, run.environment)
            return True
        try:
            self._write(run, DONE, job.finish(job, run.facts))
        except (RunsError, CheckpointError) as error:
            self._write(run, FAILED, {"error": str(error)})
        return False

    def _write(self, run: _Running, status: str, facts: Facts) -> None:
        result = {"name": run.job.name, "status": status, "error": "", **facts, "steps": run.facts}
        write_json(run.job.folder / RESULT, result)
        if status != RUNNING:
            self.results[run.job.name] = result


def find_program(name: str) -> str:
    """The program beside this Python, or on the PATH, or the name itself."""
    if os.sep in name:
        return name
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def run_command(prog: str, work: Callable[[], int], again: str) -> int:
    """Do the work of a command; errors become one line and an exit code: 2 for bad input. SIGTERM
    and SIGHUP end it as Ctrl-C does."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, stop) for number in signals}
    try:
        return work()
    except (RunsError, OSError) as error:
        print(f"{prog}: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(f"\n{prog}: stopped; go on with: {printable(again)}", file=sys.stderr)
        return 128 + int((stopped.args or (signal.SIGINT,))[0])
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
