"""The demo, end to end with the real commands: corpus, fairseq-preprocess, then fairseq-train,
fairseq-dpq-compact and fairseq-generate with a full table, DPQ-SX and DPQ-VQ. Prints one table."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Sequence

from fairseq_dpq.demo import commands, report, table
from fairseq_dpq.demo.commands import MODELS, Model, Setting
from fairseq_dpq.demo.corpus import SOURCE, write_corpus
from fairseq_dpq.demo.status import Status

# expected seconds of each job; only the progress bar uses them
WORK = {"corpus": 2.0, "preprocess": 8.0, "train": 120.0, "compact": 8.0, "generate": 15.0}


class StepFailed(Exception):
    """A command of the demo ended with an error."""


class Runner:
    """Runs the demo's steps in one output folder and remembers which are done."""

    def __init__(self, out: Path, setting: Setting, status: Status) -> None:
        self.out, self.setting, self.status = out, setting, status
        self._children: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    # -- one step --------------------------------------------------------------------------------

    def step(
        self, name: str, command: list[str], follow: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Run a command unless this same command is done already; returns its CPU seconds. The
        output goes to logs/NAME.log, and line by line to ``follow``."""
        mark = self.out / "logs" / f"{name}.done"
        key = hashlib.sha256(json.dumps([asdict(self.setting), command]).encode()).hexdigest()
        if mark.exists():
            known: dict[str, Any] = json.loads(mark.read_text())
            if known["key"] == key:
                return known
        seconds = self._run(name, command, follow)
        done = {"key": key, "seconds": seconds}
        _write_whole(mark, json.dumps(done))
        return done

    def _run(self, name: str, command: list[str], follow: Callable[[str], None] | None) -> float:
        log_path = self.out / "logs" / f"{name}.log"
        with self._lock:
            if self._stopped:
                raise StepFailed(f"{name}: stopped")
            with open(self.out / "commands.txt", "a", encoding="utf-8") as log:
                log.write(shlex.join(command) + "\n")
            child = subprocess.Popen(
                [_tool(command[0]), *command[1:]],
                cwd=self.out,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that stop() reaches its children, too
            )
            self._children.add(child)
        assert child.stdout is not None
        with open(log_path, "w", encoding="utf-8") as log:
            for line in child.stdout:
                log.write(line)
                if follow is not None:
                    follow(line)
        # wait4, because it returns the CPU time of this child alone
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = (
            -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        )
        with self._lock:
            self._children.discard(child)
        if child.returncode != 0:
            tail = "".join(log_path.read_text(encoding="utf-8").splitlines(keepends=True)[-25:])
            raise StepFailed(
                f"{tail}\n{shlex.join(command)}\nended with code {child.returncode}; the whole "
                f"output is in {log_path}"
            )
        return usage.ru_utime + usage.ru_stime

    def stop(self) -> None:
        """End all running commands."""
        with self._lock:
            self._stopped = True
            for child in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)

    # -- the whole -------------------------------------------------------------------------------

    def data(self) -> None:
        """The corpus as text and as binary data."""
        self.status.report("corpus", 0.1, "writing the corpus")
        self.status.draw()
        corpus = write_corpus(self.out / "corpus", self.setting.seed, self.setting.sizes())
        types = len({word for source, _ in corpus["train"] for word in source.split()})
        self.status.report("corpus", 1)
        self.status.say(f"corpus: {len(corpus['train']):,} sentence pairs, {types:,} source words")
        self.status.report("preprocess", 0.1, "fairseq-preprocess")
        self.step("preprocess", commands.preprocess(self.setting))
        self.status.report("preprocess", 1)

    def model(self, model: Model) -> table.Row:
        """Train, compact and translate one model."""
        folder = self.out / model.folder
        job = f"train {model.folder}"

        def follow(line: str) -> None:
            found = re.search(r"\| train_inner \| (\{.*\})", line)
            if found is not None:
                entry = json.loads(found.group(1))
                share = min(
                    int(entry["num_updates"]) / self.setting.updates, 0.99
                )  # saving follows
                self.status.report(job, share, f"{model.title} loss {entry['loss']}")

        self.status.report(job, 0.0, f"{model.title} starts")
        if not (self.out / "logs" / f"train-{model.folder}.done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # an unfinished training is restarted
        seconds = self.step(f"train-{model.folder}", commands.train(self.setting, model), follow)
        self.status.report(job, 1)

        if model.method is not None:
            self.status.report(f"compact {model.folder}", 0.1, f"{model.title} compact")
            if not (self.out / "logs" / f"compact-{model.folder}.done").exists():
                (folder / "compact.pt").unlink(missing_ok=True)
            self.step(f"compact-{model.folder}", commands.compact(model))
            self.status.report(f"compact {model.folder}", 1)

        job = f"generate {model.folder}"
        self.status.report(job, 0.1, f"{model.title} translates")
        self.step(f"generate-{model.folder}", commands.generate(model))
        self.status.report(job, 1)
        output = (self.out / "logs" / f"generate-{model.folder}.log").read_text(encoding="utf-8")
        bleu = table.read_bleu(output, self.setting.test)
        self.status.say(f"{model.title}: BLEU {bleu:.1f} from {commands.shipped(model)}")

        n, d = self._table_shape()
        bytes_now = table.embedding_bytes(self.out / commands.shipped(model))
        whole = table.model_bytes(self.out / commands.shipped(model))
        ratio = table.formula_ratio(n, d, self.setting.K, self.setting.D) if model.method else 1.0
        return table.Row(
            model=model.title,
            bleu=bleu,
            embedding_bytes=bytes_now,
            cr_formula=ratio,
            cr_measured=4 * n * d / bytes_now,
            model_bytes=whole,
            model_ratio=(whole - bytes_now + 4 * n * d) / whole,
            train_seconds=seconds["seconds"],
        )

    def _table_shape(self) -> tuple[int, int]:
        symbols = (self.out / "bin" / f"dict.{SOURCE}.txt").read_text(encoding="utf-8").splitlines()
        width = commands.MODEL.split()
        # the dictionary file does not list fairseq's four special symbols
        return len(symbols) + 4, int(width[width.index("--encoder-embed-dim") + 1])

    def run(self) -> list[table.Row]:
        """Run everything; the three models train in parallel, one thread each."""
        rows: dict[str, table.Row] = {}
        errors: list[BaseException] = []

        def work(name: str, job: Callable[[], Any]) -> None:
            try:
                rows[name] = job()
            except BaseException as error:
                errors.append(error)

        def together(jobs: dict[str, Callable[[], Any]]) -> None:
            threads = [threading.Thread(target=work, args=job, daemon=True) for job in jobs.items()]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not errors:
                self.status.draw()
                threads[0].join(0.2) if threads[0].is_alive() else threads[-1].join(0.2)
            if errors:
                raise errors[0]

        together({"data": self.data})
        self.status.say("training three models side by side")
        together({model.folder: functools.partial(self.model, model) for model in MODELS})
        return [rows[model.folder] for model in MODELS]


def _tool(name: str) -> str:
    """The command beside this Python, or on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise StepFailed(f"{name} is not installed beside {sys.executable}; run: make setup")
    return found


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def prepare(out: Path, setting: Setting) -> None:
    """Prepare the folder: steps that an interrupted run of the same setting finished are kept, a
    finished run or one of another setting is removed."""
    wanted = json.dumps(asdict(setting))
    note = out / "setting.json"
    same = note.exists() and note.read_text(encoding="utf-8") == wanted
    if same and not (out / "result.json").exists():
        if list((out / "logs").glob("*.done")):
            print("resuming the interrupted demo; finished steps are kept")
    else:
        for name in ("corpus", "bin", "logs", report.FOLDER, *(model.folder for model in MODELS)):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("result.json", "commands.txt"):
            (out / name).unlink(missing_ok=True)
        _write_whole(note, wanted)
    (out / "logs").mkdir(exist_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: ``python -m fairseq_dpq.demo.run --out demo_out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for all files")
    for name, value in asdict(Setting()).items():
        how = {"choices": ["source", "all"]} if name == "tables" else {"type": int}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=value, help=f"default {value}", **how)
    args = parser.parse_args(argv)
    setting = Setting(**{name: getattr(args, name) for name in asdict(Setting())})
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"another demo is running in {out}; choose another --out", file=sys.stderr)
            return 1
        prepare(out, setting)
        work = {"corpus": WORK["corpus"], "preprocess": WORK["preprocess"]}
        for job in ("train", "compact", "generate"):
            for model in MODELS:
                if job != "compact" or model.method is not None:
                    work[f"{job} {model.folder}"] = WORK[job]
        status = Status(work)
        runner = Runner(out, setting, status)
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            rows = runner.run()
        except KeyboardInterrupt:
            status.say("interrupted; the next run resumes after the last finished step")
            return 130
        except (StepFailed, RuntimeError, OSError) as error:
            status.say("")
            print(f"demo: {error}", file=sys.stderr)
            return 1
        finally:
            runner.stop()  # on any error: the commands run in their own sessions
        _write_whole(out / "result.json", json.dumps([row.as_dict() for row in rows], indent=1))
    print_result(rows, status.seconds, out)
    print(report.write(out))
    return 0


def print_result(rows: list[table.Row], seconds: float, out: Path) -> None:
    """The table, and what its columns mean."""
    print(f"\n{table.render(rows)}\n")
    print(
        "Bytes of tensors in the file that translated, without optimiser state: the embedding, and"
    )
    print(
        "the whole model. CR: 32-bit table against codes and values, by the formula and measured;"
    )
    print("ratio: the model with the full table against this one.")
    print("One run of each model: another seed gives up to 7 BLEU more or less (docs/quality.md).")
    print(f"{int(seconds)} s. The commands are in {out / 'commands.txt'}, their output in logs/.")


if __name__ == "__main__":
    sys.exit(main())
