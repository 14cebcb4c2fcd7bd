"""fairseq-dpq-sweep --out DIR --dpq-K 2 8 32 --dpq-D 4 16 -- fairseq-train ...: train a grid of K,
D, method and sharing, and draw score, ratio and cost."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.config import flag
from fairseq_dpq.figures.style import FiguresUnavailable
from fairseq_dpq.runs.folder import RunsError, read_json, working_in, write_json, write_whole
from fairseq_dpq.runs.logs import RunLog
from fairseq_dpq.runs.runner import DONE, Facts, Job, run_command, run_jobs
from fairseq_dpq.size_report import text_table
from fairseq_dpq.sweeps import figures
from fairseq_dpq.sweeps.grid import DPQ_METHODS, METHODS_WITH_CODES, Base, Grid, Point
from fairseq_dpq.sweeps.results import (
    LINES,
    Result,
    choose_metric,
    finish,
    front,
    read_results,
    with_full_sizes,
)

_NOTE = "sweep.json"
_USELESS = (
    "the full table's run failed before its first update, so that no other is started: fix the "
    "command, or go on without it (--no-full)"
)


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-sweep."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-sweep",
        usage="%(prog)s --out DIR [options] -- fairseq-train DATA --arch ...\n"
        "       %(prog)s --out DIR [options] --recipe NAME [-- more flags of fairseq-train]\n"
        "       %(prog)s --out DIR --resume | --plot-only",
        description="Train every combination of K, D, method and sharing with one fairseq-train "
        "command or one recipe, and a full table beside them. A stopped sweep goes on with "
        "--resume: finished runs are kept, others continue from their last checkpoint.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the sweep: runs, results, figures")
    add("--recipe", help="train a recipe of this checkout (recipes/NAME.conf)")
    grid = parser.add_argument_group("the grid: one or more values each")
    grid.add_argument(flag("K"), dest="K", type=int, nargs="+", help="default: 8 32")
    grid.add_argument(flag("D"), dest="D", type=int, nargs="+", help="default: 16 32")
    grid.add_argument(
        flag("method"),
        dest="methods",
        nargs="+",
        choices=METHODS_WITH_CODES,
        help=f"default: {' '.join(DPQ_METHODS)}",
    )
    grid.add_argument(
        flag("share_subspaces"),
        dest="sharing",
        nargs="+",
        choices=("off", "on"),
        help="default: off",
    )
    grid.add_argument("--no-full", action="store_true", help="without a run of the full table")
    add("--workers", type=int, default=1, help="runs at the same time (default: %(default)s)")
    add("--threads", type=int, help="OMP_NUM_THREADS of each run (default: cores / workers)")
    add("--launcher", default="", help="words before each command, e.g. 'srun --gres=gpu:1'")
    add("--limit", type=int, help="end after so many runs; --resume goes on with the others")
    add("--metric", help="validation metric to compare by: ppl, loss, bleu, ... (default: ppl)")
    add("--resume", action="store_true", help="go on with the sweep in --out")
    add("--dry-run", action="store_true", help="print the commands that would run, and end")
    add("--plot-only", action="store_true", help="draw the figures of the results in --out")
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


def _read_note(out: Path) -> tuple[Base, Grid] | None:
    """What a folder's sweep runs; None for a folder without one."""
    path = out / _NOTE
    if not os.path.lexists(path):
        return None
    raw = read_json(path) or {}
    try:
        base, grid = raw["base"], Grid(**raw["grid"])
        grid.points()
        return Base(tuple(base["words"]), base["recipe"], tuple(base["launcher"])), grid
    except (KeyError, TypeError, RunsError):
        raise RunsError(f"{path} is damaged; delete it, and give the command again") from None


def _base_and_grid(args: argparse.Namespace, words: Sequence[str]) -> tuple[Base, Grid]:
    """What to run: the options, and for a resumed sweep its note where they are left out."""
    known = _read_note(args.out)
    if known is not None and not (args.resume or args.dry_run):
        raise RunsError(f"{args.out} has a sweep; go on with --resume, or give another --out")
    if known is None and args.resume:
        raise RunsError(f"--resume: {args.out} has no sweep; leave --resume out to start one")
    base = Base(tuple(words), args.recipe, tuple(shlex.split(args.launcher)))
    old = Grid((8, 32), (16, 32), DPQ_METHODS)
    if known is not None:
        first, old = known
        if (words or args.recipe) and (base.words, base.recipe) != (first.words, first.recipe):
            raise RunsError(
                f"--resume: {args.out} was started with another command; leave it out here, or "
                "give another --out"
            )
        base = Base(first.words, first.recipe, base.launcher or first.launcher)
    sharing = [name == "on" for name in args.sharing or ()] or old.shared
    full = old.full and not args.no_full
    return base, Grid(args.K or old.K, args.D or old.D, args.methods or old.methods, sharing, full)


def _gpus(workers: int) -> list[str]:
    """The GPUs to share out; none if a run is to see them all."""
    if workers == 1:
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name for name in listed.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def sweep(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Do what the command line asks for; the exit code."""
    if args.plot_only:
        return _show(args, read_results(args.out))
    base, grid = _base_and_grid(args, words)
    for name in ("workers", "threads", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise RunsError(f"--{name} {getattr(args, name)}: must be 1 or more")
    points = {point.name: point for point in grid.points()}
    base.check(list(points.values())[-1], args.out)
    jobs = []
    for name, point in points.items():
        folder = args.out / "runs" / name
        jobs.append(Job(name, folder, [base.step(point, folder)], partial(finish, point)))
    if args.dry_run:
        for job in jobs:
            if job.done() is None:
                print(job.steps[0])
        return 0
    threads = args.threads or max(1, (os.cpu_count() or 1) // args.workers)

    def write(results: dict[str, Facts]) -> list[Result]:
        """results.jsonl, a line for each run that has ended."""
        ended = [(results[name], point) for name, point in points.items() if name in results]
        rows = with_full_sizes(Result.from_facts({**facts, **asdict(p)}) for facts, p in ended)
        write_whole(args.out / LINES, "".join(json.dumps(asdict(row)) + "\n" for row in rows))
        return rows

    def go_on(results: dict[str, Facts]) -> str:
        write(results)
        full = results.get(Point().name, {"status": DONE})
        useless = full["status"] != DONE and not RunLog(jobs[0].folder / "train.log").read().updates
        return _USELESS if useless else ""

    with working_in(args.out):
        write_json(args.out / _NOTE, {"base": asdict(base), "grid": asdict(grid)})
        gpus, line = _gpus(args.workers), partial(_line, args.metric)
        found = run_jobs(jobs, args.workers, threads, gpus, args.limit, line, go_on)
        return _show(args, write(found))


def _line(metric: str | None, facts: Facts) -> str:
    name = metric or choose_metric([Result("", scores=facts["scores"])], None)
    ratio = "" if facts.get("ratio") is None else f", ratio {facts['ratio']:.1f}"
    return f"{name} {facts['scores'].get(name, 'unknown')}{ratio}"


def _show(args: argparse.Namespace, results: list[Result]) -> int:
    """Table or JSON, and the figures; 1 if a run failed."""
    metric = choose_metric(results, args.metric)
    drawn: list[Path] = []
    try:
        drawn = figures.draw_all(results, metric, args.out / "figures")
    except FiguresUnavailable as error:
        print(f"fairseq-dpq-sweep: no figures: {error}", file=sys.stderr)
    if args.json:
        facts: dict[str, Any] = {"metric": metric, "runs": [asdict(r) for r in results]}
        facts["front"] = [r.name for r in front(results, metric)]
        facts["figures"] = [str(path) for path in drawn]
        print(json.dumps(facts, indent=2))
    else:
        print(_text(results, metric))
        for path in drawn:
            print(path)
    return 0 if all(result.done for result in results) else 1


def _text(results: list[Result], metric: str) -> str:
    best = {result.name for result in front(results, metric)}
    rows = [["run", metric, "bytes", "ratio", "CPU s", "peak MB", "front"]]
    for r in results:
        if r.done:
            peak = None if r.peak_bytes is None else r.peak_bytes / 1e6
            cells = [r.scores.get(metric), r.bytes, r.ratio, r.cpu_seconds, peak]
            forms = ("g", ",", ".1f", ".0f", ".0f")
            shown = ["-" if x is None else format(x, form) for x, form in zip(cells, forms)]
            rows.append([r.name, *shown, "*" if r.name in best else ""])
    failed = [f"{r.name}: failed, {r.error}" for r in results if not r.done]
    return "\n".join([text_table(rows), *failed])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit code: 2 for bad input, 1 if a run failed."""
    return run_command(get_parser(), sweep, argv, "fairseq-dpq-sweep --out {out} --resume")


if __name__ == "__main__":
    sys.exit(main())
