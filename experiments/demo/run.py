"""The demo, end to end with the real commands: corpus, fairseq-preprocess, then fairseq-train,
fairseq-dpq-compact and fairseq-generate with a full table, DPQ-SX and DPQ-VQ. Prints one table, and
writes a report page."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Sequence

from experiments.demo import commands, table
from experiments.demo.commands import MODELS, Model, Setting
from experiments.demo.corpus import SOURCE, TARGET
from experiments.score import ScoreError, bleu, read_lines, read_translations
from fairseq_dpq.cli import report as report_tool
from fairseq_dpq.runs.folder import RunsError, read_json, working_in, write_json, write_whole
from fairseq_dpq.runs.runner import Facts, Job, Runner, Step, run_command

_ROOT = Path(__file__).resolve().parents[2]
_DATA = "data"


def jobs(out: Path, setting: Setting) -> list[Job]:
    """The data, then the three models: train, compact, translate."""
    here = {"PYTHONPATH": f"{_ROOT}"}
    corpus = Step("corpus", commands.corpus(setting), here, cwd=out)
    preprocess = Step("preprocess", commands.preprocess(setting), cwd=out, fresh=(out / "bin",))
    found = [Job(_DATA, out / "logs" / _DATA, [corpus, preprocess])]
    for model in MODELS:
        folder = out / model.folder
        steps = [Step("train", commands.train(setting, model), cwd=out, fresh=(folder,), weight=10)]
        if model.method is not None:
            small = (folder / "compact.pt",)
            steps.append(Step("compact", commands.compact(model), cwd=out, fresh=small))
        steps.append(Step("generate", commands.generate(model), cwd=out))
        finish = partial(_row, out, setting, model)
        found.append(Job(model.folder, out / "logs" / model.folder, steps, finish, (_DATA,)))
    return found


def _row(out: Path, setting: Setting, model: Model, job: Job, steps: list[Facts]) -> Facts:
    """The model's row of the table."""
    try:
        translations = read_translations(job.folder / "generate.log")
        references = read_lines(out / "corpus" / f"test.{TARGET}")
        score = bleu(translations, references, "none")["BLEU"]
    except ScoreError as error:
        raise RunsError(str(error)) from error
    symbols = (out / "bin" / f"dict.{SOURCE}.txt").read_text(encoding="utf-8").splitlines()
    n, d = len(symbols) + 4, commands.WIDTH  # the file does not list fairseq's four specials
    small, whole = table.measure(out / commands.shipped(model))
    row = table.Row(
        model=model.title,
        bleu=score,
        embedding_bytes=small,
        cr_formula=table.formula_ratio(n, d, setting.K, setting.D) if model.method else 1.0,
        cr_measured=4 * n * d / small,
        model_bytes=whole,
        model_ratio=(whole - small + 4 * n * d) / whole,
        train_seconds=steps[0]["cpu_seconds"] or 0.0,
    )
    return {"row": asdict(row)}


def prepare(out: Path, setting: Setting) -> None:
    """Prepare the folder: steps that an interrupted run of the same setting finished are kept, a
    finished run or one of another setting is removed."""
    note, wanted = out / "setting.json", asdict(setting)
    if read_json(note) == wanted and not (out / "result.json").exists():
        if (out / "logs").is_dir():
            print("resuming the interrupted demo; finished steps are kept")
        return
    for name in ("corpus", "bin", "logs", "report", *(model.folder for model in MODELS)):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("result.json", "commands.txt"):
        (out / name).unlink(missing_ok=True)
    write_json(note, wanted)


def demo(out: Path, setting: Setting) -> int:
    """Run everything; the three models train side by side, one thread each."""
    start = time.monotonic()
    with working_in(out):
        prepare(out, setting)
        todo = jobs(out, setting)
        lines = [command for job in todo for command in job.commands()]
        report = report_command()
        write_whole(out / "commands.txt", "\n".join([*lines, shlex.join(report)]) + "\n")
        runner = Runner(todo, line=_line, every=15.0)
        results = runner.run(workers=len(MODELS), threads=1)
        rows = [results[m.folder]["row"] for m in MODELS if "row" in results.get(m.folder, {})]
        if len(rows) < len(MODELS):
            return 1
        write_json(out / "result.json", {"rows": rows})
        _print_result([table.Row(**row) for row in rows], time.monotonic() - start, out)
        at = time.monotonic()
        # The demo has succeeded without it.
        if report_tool.main([_absolute(out, word) for word in report[1:]] + ["--force"]) == 0:
            print(f"Codes, neighbours and curves, in {time.monotonic() - at:.0f} s")
    return 0


def _line(result: Facts) -> str:
    return f"BLEU {result['row']['bleu']:.1f}" if "row" in result else "done"


def report_command() -> list[str]:
    """The command that writes the report, in the demo's folder."""
    words = ["fairseq-dpq-report"]
    for model in MODELS:
        words.append(f"{model.title}={model.folder}/checkpoint_best.pt")
        if model.method is not None:
            words.append(f"{model.title} compact={commands.shipped(model)}")
    for model in MODELS:
        words += ["--log", f"{model.title}=logs/{model.folder}/train.log"]
    shown = ["horse", "house", "doctor", "bread", "quickly", "took"]
    return [*words, "--words", *shown, "--title", "DPQ demo", "--out", "report"]


def _absolute(out: Path, word: str) -> str:
    """A word of the report's command, for any folder."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{out / path}" if "/" in path or path == "report" else word


def _print_result(rows: list[table.Row], seconds: float, out: Path) -> None:
    print(
        f"\n{table.render(rows)}\n\n"
        "Bytes of tensors in the file that translated, without optimiser state: the embedding and\n"
        "the whole model. CR: 32-bit table against codes and values, by the formula and measured;\n"
        "ratio: the model with the full table against this one.\n"
        "One run of each model: a difference of a few tenths of BLEU may be chance.\n"
        f"{int(seconds)} s. The commands are in {out / 'commands.txt'}, their output in logs/."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: ``python -m experiments.demo.run --out demo_out``."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for all files")
    for name, value in asdict(Setting()).items():
        how = {"choices": ["source", "all"]} if name == "tables" else {"type": type(value)}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=value, help=f"default {value}", **how)
    args = parser.parse_args(argv)
    setting = Setting(**{name: getattr(args, name) for name in asdict(Setting())})
    return run_command("demo", lambda: demo(args.out.absolute(), setting), "the same command")


if __name__ == "__main__":
    sys.exit(main())
