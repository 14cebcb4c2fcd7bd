"""The demo, end to end with the real commands: corpus, fairseq-preprocess, then fairseq-train,
fairseq-dpq-compact and fairseq-generate with a full table, DPQ-SX and DPQ-VQ. Prints one table, and
writes a report page."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Sequence

from experiments.demo import commands, table
from experiments.demo.commands import MODELS, Model, Setting
from experiments.demo.corpus import TARGET
from experiments.score import bleu, read_lines, read_translations
from fairseq_dpq.runs.folder import read_json, working_in, write_json, write_whole
from fairseq_dpq.runs.runner import DONE, Facts, Job, Step, run_command, run_jobs

_ROOT = Path(__file__).resolve().parents[2]
_DATA, _REPORT = "data", "report"  # the jobs beside the models


def jobs(out: Path, setting: Setting) -> list[Job]:
    """The data, then the three models: train, compact, translate; then the report. What an
    unfinished preparation of the data left is removed."""
    here = {"PYTHONPATH": f"{_ROOT}"}
    corpus = Step("corpus", commands.corpus(setting), here, cwd=out)
    preprocess = Step("preprocess", commands.preprocess(setting), cwd=out)
    found = [Job(_DATA, out / "logs" / _DATA, [corpus, preprocess])]
    if found[0].done() is None:  # fairseq-preprocess refuses a folder with a dictionary
        shutil.rmtree(out / "bin", ignore_errors=True)
    for model in MODELS:
        steps = [Step("train", commands.train(setting, model), cwd=out, weight=10)]
        if model.method is not None:
            steps.append(Step("compact", commands.compact(model), cwd=out))
        steps.append(Step("generate", commands.generate(model), cwd=out))
        finish = partial(_row, out, model)
        found.append(Job(model.folder, out / "logs" / model.folder, steps, finish, (_DATA,)))
    report = [Step("report", commands.report(), cwd=out)]
    after = tuple(model.folder for model in MODELS)
    return [*found, Job(_REPORT, out / "logs" / _REPORT, report, after=after)]


def _row(out: Path, model: Model, job: Job, steps: list[Facts]) -> Facts:
    """The model's row of the table."""
    translations = read_translations(job.folder / "generate.log")
    references = read_lines(out / "corpus" / f"test.{TARGET}")
    small, whole, full, formula = table.measure(out / commands.shipped(model))
    row = table.Row(
        model=model.title,
        bleu=bleu(translations, references, "none")["BLEU"],
        embedding_bytes=small,
        cr_formula=formula,
        cr_measured=full / small,
        model_bytes=whole,
        model_ratio=(whole - small + full) / whole,
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


def demo(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run everything; the three models train side by side, one thread each."""
    start, out = time.monotonic(), args.out.absolute()
    setting = Setting(**{name: getattr(args, name) for name in asdict(Setting())})
    with working_in(out):
        prepare(out, setting)
        todo = jobs(out, setting)
        lines = [command for job in todo for command in job.commands()]
        write_whole(out / "commands.txt", "\n".join(lines) + "\n")
        results = run_jobs(todo, workers=len(MODELS), threads=1, line=_line, every=15.0)
        rows = [results[m.folder]["row"] for m in MODELS if "row" in results.get(m.folder, {})]
        if len(rows) < len(MODELS):
            return 1
        # The demo has succeeded, also without a report.
        write_json(out / "result.json", {"rows": rows})
        _print_result([table.Row(**row) for row in rows], time.monotonic() - start, out)
        if results.get(_REPORT, {}).get("status") == DONE:
            print(f"Codes, neighbours and curves are in {out / _REPORT}.")
    return 0


def _line(result: Facts) -> str:
    return f"BLEU {result['row']['bleu']:.1f}" if "row" in result else "done"


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
    return run_command(parser, demo, argv)


if __name__ == "__main__":
    sys.exit(main())
