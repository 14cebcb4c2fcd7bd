"""Makes a table of the paper: prints the commands, runs those that are missing, writes the figures.

Run as scripts/reproduce.sh TABLE, from the root of the checkout. A row that was broken off goes on
where it was; one that is complete is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.reproduce import report
from fairseq_dpq.reproduce.planning import SCALES, Planned, ReproduceError, Step, find_table, plan
from fairseq_dpq.reproduce.rows import TABLES

_MODULES = {
    "fairseq-dpq-compact": "fairseq_dpq.cli.compact",
    "fairseq-dpq-export": "fairseq_dpq.cli.export",
    "fairseq-dpq-quantize": "fairseq_dpq.cli.quantize",
}


def get_parser() -> argparse.ArgumentParser:
    """The options of scripts/reproduce.sh."""
    parser = argparse.ArgumentParser(
        prog="scripts/reproduce.sh",
        description="Make a table of the paper: train, compact and score the rows that are "
        "missing, and write them beside the paper's figures.",
        epilog="Flags after -- go to every training, e.g. -- --max-epoch 1. DATA and PYTHON are "
        "passed on to scripts/train.sh.",
    )
    parser.add_argument("table", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument(
        "--rows",
        metavar="NAME",
        nargs="+",
        default=[],
        help="only these rows; a part of a name will do",
    )
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="cpu",
        help="cpu: what fits a small machine; paper: the paper's sizes (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="folder (default: reproduced/SCALE)")
    parser.add_argument("--subset", help="split to score (default: the recipe's, test)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Make a table; the exit code: 1 if a row failed, 2 for wrong arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    more = words[words.index("--") + 1 :] if "--" in words else []
    parser = get_parser()
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    out = args.out or Path("reproduced") / args.scale
    try:
        table = find_table(args.table)
        items = plan(table, args.scale, out, args.rows, more, args.subset)
        for item in items:
            _check_same(item)
    except ReproduceError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    for item in items:
        print(f"# {item.name}" + (" (done)" if _result(item) else ""))
        for step in item.steps:
            print(step)
    if args.dry_run:
        return 0
    failed = [item.name for item in items if not _run_row(item)]
    name = args.table.upper()
    rows = [report.facts(i, _result(i)) for i in plan(table, args.scale, out) if _listed(i, table)]
    report.write(out, name, table.title, args.scale, rows)
    print(f"{out / name}.md and {name}.json: written")
    for name in failed:
        print(f"{parser.prog}: {name} failed; its logs are beside its checkpoints", file=sys.stderr)
    return 1 if failed else 0


def _listed(item: Planned, table: Any) -> bool:
    """Whether a planned row is one of the table, not only what another one starts from."""
    return item.row in table.rows


def _result(item: Planned) -> dict[str, Any] | None:
    """The figures of a row that is complete."""
    path = item.folder / "result.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _check_same(item: Planned) -> None:
    """A row that other flags have made must not be taken for this one. One that failed before it
    had a checkpoint has made nothing."""
    path = item.folder / "commands.json"
    if _result(item) is None and not any(item.folder.glob("*.pt")):
        return
    commands = [str(step) for step in item.steps]
    if path.is_file() and json.loads(path.read_text()) != commands:
        raise ReproduceError(
            f"{item.folder} was made by other commands (commands.json there); use another --out, "
            "or delete it"
        )


def _run_row(item: Planned) -> bool:
    """Run the steps of a row that are missing; whether all went well."""
    if _result(item) is not None:
        return True
    item.folder.mkdir(parents=True, exist_ok=True)
    commands = [str(step) for step in item.steps]
    (item.folder / "commands.json").write_text(json.dumps(commands, indent=2) + "\n")
    start = time.monotonic()
    for step in item.steps:
        if step.makes is not None and step.makes.is_file():
            continue
        print(f"{item.name}: {step.words[0]}", flush=True)
        if not _run_step(step):
            return False
    found = report.result(item)
    if found["score"] is None:
        print(f"{item.name}: no {item.metric} in {item.folder / 'score.log'}", file=sys.stderr)
        return False
    found["seconds"] = round(time.monotonic() - start)
    (item.folder / "result.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"{item.name}: {item.metric} {found['score']:.2f}", flush=True)
    return True


def _run_step(step: Step) -> bool:
    """Run one command; its output goes to its log, errors of tools to the terminal too."""
    module = _MODULES.get(step.words[0])
    words = [sys.executable, "-m", module, *step.words[1:]] if module else ["sh", *step.words]
    step.log.parent.mkdir(parents=True, exist_ok=True)
    json_only = "--json" in step.words
    with open(step.log, "a" if step.resumes else "w", encoding="utf-8") as log:
        done = subprocess.run(
            words,
            env={**os.environ, **step.environment},
            stdout=log,
            stderr=None if json_only else subprocess.STDOUT,
        )
    if done.returncode:
        print(f"{step.words[0]} failed ({done.returncode}): {step.log}", file=sys.stderr)
        said = step.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(said) if line.strip()), "")
        if last and not json_only:
            print(f"    {last}", file=sys.stderr)
        if step.makes is not None and step.makes.is_file():
            step.makes.unlink()
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
