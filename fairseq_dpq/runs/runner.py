"""Runs jobs, lists of commands, some at a time, and keeps one result of each.

A job that was broken off goes on with the command that was not done; a finished one is not run
again. However the runner ends, SIGKILL included, its commands end too (guard.py).
"""

from __future__ import annotations

import argparse
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

from fairseq_dpq.files.errors import CheckpointError, DPQConfigError, printable
from fairseq_dpq.runs.folder import RunsError, read_json, write_json
from fairseq_dpq.runs.logs import ATTEMPT, RunLog

_GUARD = Path(__file__).with_name("guard.py")
_POLL, _LOOK = 0.1, 2.0  # seconds between looks at processes, and at the bar
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
    weight: float = 1.0  # its share of the job's time, for the progress bar

    def __str__(self) -> str:
        """As one could type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass
class Job:
    """Commands in order, and what their result is.

    `finish` gets the job and the facts of its steps, and returns what result.json holds besides. If
    it raises CheckpointError, the job has failed. `after` names jobs that must be done before.
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


class _Running:
    """A job that is going on: one command after the other, each under a guard, which ends it when
    its standard input is closed."""

    def __init__(self, job: Job, slot: int, environment: dict[str, str]) -> None:
        self.job, self.slot, self.environment = job, slot, environment
        self.facts: list[Facts] = []  # of the steps that are done
        # The last one runs again if all but the result was there.
        for step, known in zip(job.steps[:-1], job.state().get("steps", [])):
            if not isinstance(known, dict) or known.get("command") != str(step):
                break
            self.facts.append(known)
        job.folder.mkdir(parents=True, exist_ok=True)
        self._start()

    def wait(self) -> int:
        """Wait for its end; the exit code. The guard's lock is of no use then."""
        code = self.process.wait()
        (self.job.folder / ".running").unlink(missing_ok=True)
        return code

    @property
    def step(self) -> Step:
        return self.job.steps[len(self.facts)]

    def _start(self) -> None:
        folder, step = self.job.folder, self.step
        (folder / "usage.json").unlink(missing_ok=True)
        self.log = RunLog(folder / f"{step.name}.log")
        with contextlib.ExitStack() as files:
            said = out = files.enter_context(open(self.log.path, "ab" if step.resumes else "wb"))
            if step.json:
                out = files.enter_context(open(folder / f"{step.name}.json", "wb"))
            if step.resumes:
                said.write(f"{ATTEMPT} {self.log.read().attempts + 1}\n".encode())
                said.flush()
            words = [str(folder.absolute()), find_program(step.words[0]), *step.words[1:]]
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=said,
                cwd=step.cwd,
                env={**os.environ, **self.environment, **step.environment},
                start_new_session=True,  # a group of its own, which the guard may kill
            )

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def share(self) -> float:
        """The share of the job that is done."""
        weights = [step.weight for step in self.job.steps]
        done = sum(weights[: len(self.facts)])
        return (done + self.step.weight * self.log.read().progress()) / sum(weights)

    def __str__(self) -> str:
        loss = self.log.loss
        doing = self.step.name if loss is None else f"loss {loss:g}"
        return f"{self.job.name} {self.share():.0%}, {doing}"

    def result(self) -> Facts | None:
        """What result.json says, once the job has ended. If a command has, the next one starts."""
        if self.process.poll() is None:
            return None
        self.close()
        self.log.read()
        step, code = self.step, self.wait()
        if code != 0:
            said = self.log.last_line or "no output"
            return self._write(FAILED, {"error": f"{step.name}: exit code {code}: {said}"})
        usage = read_json(self.job.folder / "usage.json") or {}
        facts = {"name": step.name, "command": str(step), "attempts": max(self.log.attempts, 1)}
        facts.update({key: usage.get(key) for key in ("seconds", "cpu_seconds", "peak_bytes")})
        self.facts.append(facts)
        if len(self.facts) < len(self.job.steps):
            self._write(RUNNING, {})
            self._start()
            return None
        try:
            return self._write(DONE, self.job.finish(self.job, self.facts))
        except CheckpointError as error:
            return self._write(FAILED, {"error": str(error)})

    def _write(self, status: str, facts: Facts) -> Facts:
        own = {"name": self.job.name, "status": status, "steps": self.facts}
        result = {"error": "", **facts, **own}
        write_json(self.job.folder / RESULT, result)
        return result


class _Lines(io.StringIO):
    """What a bar draws, as lines: a log has no use for its carriage returns."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr)
        return len(text)


def run_jobs(
    jobs: Sequence[Job],
    workers: int = 1,
    threads: int | None = None,
    gpus: Sequence[str] = (),
    limit: int | None = None,
    line: Callable[[Facts], str] = lambda result: "done",
    go_on: Callable[[dict[str, Facts]], str] = lambda results: "",
    every: float = 60.0,
) -> dict[str, Facts]:
    """Run what is not done yet, at most `limit` jobs, in folders whose lock the caller holds; all
    results by name. On any exception, what runs is ended before it is passed on.

    `line` words a result. If `go_on`, asked after each result, has something to say, no further job
    is started. A bar shows how far the jobs are; without a terminal, `every` so many seconds.
    """
    found = {job.name: job.done() for job in jobs}
    results: dict[str, Facts] = {name: facts for name, facts in found.items() if facts}
    queue = [job for job in jobs if job.name not in results][:limit]
    running: list[_Running] = []
    terminal = sys.stderr.isatty()
    options: Any = {
        "initial": len(results),
        "bar_format": "{l_bar}{bar}| {elapsed} so far, about {remaining} to go{postfix}",
        "smoothing": 0,
        "miniters": 0,
        "mininterval": _LOOK if terminal else every,
        "file": sys.stderr if terminal else _Lines(),
    }
    bar = tqdm(total=len(jobs), desc=f"{len(jobs)} runs", **options)
    try:
        while queue or running:
            done = {name for name, result in results.items() if result["status"] == DONE}
            missing = found.keys() - done
            ready = [job for job in queue if not missing.intersection(job.after)]
            for job in ready[: workers - len(running)]:
                slot = min(set(range(workers)) - {r.slot for r in running})
                environment = {"PYTHONUNBUFFERED": "1"}
                if threads is not None:
                    environment["OMP_NUM_THREADS"] = str(threads)
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
                queue.remove(job)
                running.append(_Running(job, slot, environment))
                bar.initial += running[-1].share()  # what was done takes no time now
            if not running:  # what the others wait for has failed
                break
            time.sleep(_POLL)
            for run in list(running):
                result = run.result()
                if result is None:
                    continue
                running.remove(run)
                results[run.job.name] = result
                failed = f"FAILED, {result['error']} (logs: {run.job.folder})"
                said = line(result) if result["status"] == DONE else failed
                tqdm.write(f"{run.job.name}: {said}", file=sys.stderr)
                problem = go_on(results)
                if problem and queue:
                    tqdm.write(problem, file=sys.stderr)
                    queue.clear()
            bar.n = len(results) + sum(run.share() for run in running)
            bar.set_postfix_str("; ".join(map(str, running)), refresh=False)
            bar.update(0)  # draws it, now and then
    finally:
        bar.close()
        for run in running:
            run.close()
        for run in running:
            run.wait()
    return results


def find_program(name: str) -> str:
    """The program beside this Python, or on the PATH, or the name itself."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return shutil.which(name, path=os.pathsep.join(places)) or name


def run_command(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace, list[str]], int],
    argv: Sequence[str] | None,
    again: str = "the same command",
) -> int:
    """The `main` of a command: `work` gets its options, and the words behind `--`. Errors become a
    line and an exit code: 2 for bad input. SIGTERM and SIGHUP end it as Ctrl-C does."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(number)

    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:at])
    old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return work(args, given[at + 1 :])
    except (CheckpointError, DPQConfigError, OSError) as error:
        print(f"{parser.prog}: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        words = again.format(**{name: shlex.quote(str(x)) for name, x in vars(args).items()})
        print(f"\n{parser.prog}: stopped; go on with: {printable(words)}", file=sys.stderr)
        return 128 + int((stopped.args or (signal.SIGINT,))[0])
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
