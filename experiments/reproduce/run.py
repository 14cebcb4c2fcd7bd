"""Makes a table of the paper: prints the commands, runs those that are missing, writes the results.

Run as scripts/reproduce.sh TABLE, from the root of the checkout. A row that was broken off goes on
where it was; one that is complete is not run again.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Sequence

from experiments.reproduce.rows import CPU, CPU_ENVIRONMENT, METRICS, TABLES, WIDTH, Row, Table
from experiments.results import PROVENANCE, provenance, record, recorded
from fairseq_dpq.runs.folder import RunsError, working_in, write_json, write_whole
from fairseq_dpq.runs.runner import DONE, Facts, Job, Step, run_command, run_jobs

_LEARN = "--form additive_codes --dpq-K 32 --dpq-D 32"


@dataclass(frozen=True)
class Plan:
    """What to make: a table at a scale in a folder; `more` are further flags of every training,
    `subset` is the split to score."""

    table: Table
    scale: str
    out: Path
    more: tuple[str, ...] = ()
    subset: str | None = None

    def recipe(self, name: str) -> str:
        """What stands for a recipe at this scale."""
        return CPU[name][0] if self.scale == "cpu" else name

    def name(self, row: Row) -> str:
        """As --rows takes it; also the row's folder."""
        return f"{self.recipe(row.recipe)}/{slug(row.label)}"

    def metric(self, row: Row) -> str:
        return row.metric or self.table.metric

    def listed(self) -> list[Row]:
        """The rows that run at this scale."""
        return [row for row in self.table.rows if self.scale != "cpu" or row.recipe in CPU]

    def jobs(self, wanted: Sequence[str] = ()) -> list[Job]:
        """The rows, and before each what it starts from. With `wanted`, only the rows of these
        names, or, where a word is no name, all whose names hold it."""
        names = list(dict.fromkeys(self.name(row) for row in self.listed()))
        chosen = set() if wanted else set(names)
        for word in wanted:
            found = [word] if word in names else [name for name in names if word in name]
            if not found:
                raise RunsError(
                    f"no row of this table has a name with {word} at --scale {self.scale}; it has "
                    + ", ".join(names)
                )
            chosen.update(found)
        jobs: dict[str, Job] = {}
        for row in self.listed():
            if self.name(row) in chosen:
                for one in (*_before(row), row):
                    name, after = self.name(one), tuple(map(self.name, _before(one)))
                    finish = partial(_result, self.metric(one))
                    job = Job(name, self.out / name, self._steps(one), finish, after)
                    jobs.setdefault(name, job)
        return list(jobs.values())

    def _steps(self, row: Row) -> list[Step]:
        folder, recipe = self.out / self.name(row), self.recipe(row.recipe)
        full = self.out / recipe / "full" / "checkpoint_best.pt"
        codes = full.with_name("codes.safetensors")
        small = folder / "compact.pt"
        if row.quantize:
            width = WIDTH.get(recipe, 0)
            how = re.sub(r"@width/(\d+)", lambda m: str(width // int(m.group(1))), row.quantize)
            words = ["fairseq-dpq-quantize", str(full), str(small), *how.split()]
            step = Step("compact", [*words, "--force", "--json"], json=True)
            return [step, self._score(row, small)]
        steps = []
        if "@codes" in row.flags:
            stored = full.with_name("additive.pt")
            words = ["fairseq-dpq-quantize", str(full), str(stored), *_LEARN.split(), "--force"]
            steps.append(Step("additive", words))
            words = ["fairseq-dpq-export", str(stored), str(codes), "--force"]
            steps.append(Step("export", words))
        flags = row.flags.replace("@full", str(full)).replace("@codes", str(codes)).split()
        environment = {"SAVE_DIR": str(folder)}
        if self.scale == "cpu":
            flags += CPU[row.recipe][1].split()
            environment.update(CPU_ENVIRONMENT.get(row.recipe, {}))
        if row.pretrained:
            before = self.out / self.name(_before(row)[0]) / "checkpoint_best.pt"
            environment["PRETRAINED"] = str(before)
        words = ["scripts/train.sh", recipe, row.method, *flags, *self.more]
        steps.append(Step("train", words, environment, resumes=True, weight=10))
        # Fine-tuning ends with its last epoch, as BERT's own script does.
        best = folder / ("checkpoint_last.pt" if row.pretrained else "checkpoint_best.pt")
        if row.full:
            return [*steps, self._score(row, best)]
        words = ["fairseq-dpq-compact", str(best), str(small), "--force", "--json"]
        return [*steps, Step("compact", words, json=True), self._score(row, small)]

    def _score(self, row: Row, checkpoint: Path) -> Step:
        words = ["scripts/score.sh", self.recipe(row.recipe), str(checkpoint)]
        if self.subset is not None:
            words += [METRICS[self.metric(row)][0], self.subset]
        return Step("score", words, json=True)


def slug(label: str) -> str:
    """A label as a folder's name."""
    text = label.lower().replace("+", " plus").replace("'", "")
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _before(row: Row) -> list[Row]:
    """Rows that another one starts from: the full table, or a pre-trained model."""
    if row.pretrained:
        return [Row(row.label, row.pretrained, row.method, metric="masked perplexity")]
    if row.quantize or "@full" in row.flags or "@codes" in row.flags:
        return [Row("full", row.recipe)]
    return []


def _result(metric: str, job: Job, steps: list[Facts]) -> Facts:
    """The score and the sizes of a row whose steps are done."""
    scores = job.output("score")
    found = next((scores[key] for key in METRICS[metric][1:] if key in scores), None)
    if not isinstance(found, (int, float)):
        raise RunsError(f"no {metric} in {job.folder / 'score.json'}")
    formula, measured, model = 1.0, 1.0, 1.0
    if any(step.name == "compact" for step in job.steps):
        facts = job.output("compact")
        formula, measured = ratios(facts)
        model = facts["sizes"]["model"]["ratio"]
    seconds = round(sum(step["seconds"] or 0 for step in steps))
    sizes = {"ratio_formula": formula, "ratio_measured": measured, "ratio_model": model}
    return {
        "score": found,
        **sizes,
        "commands": job.commands(),
        "seconds": seconds,
        **provenance(),
    }


def ratios(facts: dict[str, Any]) -> tuple[float, float]:
    """Compression ratios, by the formula and measured, over all tables of a checkpoint."""
    full, formula, measured = (
        sum(row[name] for row in facts["embeddings"])
        for name in ("full_bytes", "formula_bytes", "compact_bytes")
    )
    return full / formula, full / measured


def _check_same(job: Job) -> None:
    """A row that other flags have made must not be taken for this one. One that failed before it
    had a checkpoint has made nothing."""
    known = [step.get("command") for step in job.state().get("steps", [])]
    made = job.done() is not None or any(job.folder.glob("*.pt"))
    if made and known and known != job.commands()[: len(known)]:
        raise RunsError(
            f"{job.folder} was made by other commands (result.json there); use another --out, or "
            "delete it"
        )


def row_facts(plan: Plan, row: Row, own: Facts) -> dict[str, Any]:
    """One row for the JSON file: the paper's results and ours, null where there are none yet."""
    return {
        "name": plan.name(row),
        "recipe": plan.recipe(row.recipe),
        "method": row.label,
        "metric": plan.metric(row),
        "paper": row.paper,
        "paper_ratio": row.paper_ratio,
        "paper_recipe": row.recipe,
        **{
            key: own.get(key) for key in ("score", "ratio_formula", "ratio_measured", "ratio_model")
        },
        "commands": own.get("commands", []),
        **{key: own.get(key, "unknown") for key in PROVENANCE},
    }


def command_of(table: str, plan: Plan) -> str:
    """The command that makes all rows of a table."""
    words = ["scripts/reproduce.sh", table, "--scale", plan.scale]
    words += ["--subset", plan.subset] if plan.subset else []
    return " ".join([*words, *(["--", *plan.more] if plan.more else [])])


def seed_of(plan: Plan) -> int:
    """The seed of all trainings; RunsError for what is none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seed", default=1)  # fairseq's default
    seed = parser.parse_known_args(plan.more)[0].seed
    try:
        return int(seed)
    except ValueError:
        raise RunsError(f"--seed {seed}: must be a whole number") from None


def as_results(table: str, plan: Plan, rows: Sequence[Facts]) -> tuple[dict[str, Any], list[Facts]]:
    """Rows with a score as experiments/results keeps them, and the head of a new file."""
    seed = seed_of(plan)
    found: dict[str, Facts] = {}  # where a small recipe stands for a larger one too: its own row
    for row in sorted(rows, key=lambda row: row["recipe"] != row["paper_recipe"]):
        ours: Facts = {"model": row["method"], "data": row["recipe"], "seeds": [seed]}
        for key, digits in (("formula", 1), ("measured", 1), ("model", 2)):
            if row[f"ratio_{key}"] is not None:
                name = {"formula": "ratio"}.get(key, f"{key}_ratio")
                ours[name] = round(row[f"ratio_{key}"], digits)
        assert plan.subset is not None
        ours[plan.subset] = round(row["score"], 2)
        if row["paper"] is not None and plan.scale == "paper":
            name = f"{row['recipe']}, {row['method']}"
            ours.update(paper=row["paper"], paper_ratio=row["paper_ratio"], paper_row=name)
        ours.update({key: row[key] for key in PROVENANCE}, command="; ".join(row["commands"]))
        found.setdefault(row["name"], ours)
    title = f"{plan.table.title}, scale {plan.scale}"
    metric = rows[0]["metric"]
    command = command_of(table, plan)
    head = {"title": title, "metric": metric, "valid_metric": metric, "command": command}
    return {**head, "note": "One run each."}, list(found.values())


def markdown(title: str, scale: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown."""

    def number(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    lines = [
        f"# {title}\n\nScale: {scale}.\n",
        "| recipe | method | metric | paper | CR, paper | here | CR formula | CR measured |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        numbers = [number(row["paper"]), number(row["paper_ratio"]), number(row["score"], 2)]
        numbers += [number(row["ratio_formula"]), number(row["ratio_measured"])]
        lines.append(f"| {' | '.join([row['recipe'], row['method'], row['metric'], *numbers])} |")
    for recipe, paper in {row["recipe"]: row["paper_recipe"] for row in rows}.items():
        if recipe != paper:
            lines += ["", f"The paper's results beside {recipe} are those of {paper}."]
    return "\n".join(lines) + "\n"


def _name(text: str) -> str:
    if not re.fullmatch(r"\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not made of letters, digits and _")
    return text


def get_parser() -> argparse.ArgumentParser:
    """The options of scripts/reproduce.sh."""
    parser = argparse.ArgumentParser(
        prog="scripts/reproduce.sh",
        description="Make a table of the paper: train, compact and score the rows that are "
        "missing, and write them beside the paper's results.",
        epilog="Flags after -- go to every training, e.g. -- --max-epoch 1. DATA and PYTHON are "
        "passed on to scripts/train.sh.",
    )
    add = parser.add_argument
    add("table", type=str.upper, choices=TABLES)
    add("--rows", metavar="NAME", nargs="+", default=[], help="only these rows; a part of a name "
        "will do")  # fmt: skip
    add("--scale", choices=("cpu", "paper"), default="cpu", help="cpu: what fits a small machine; "
        "paper: the paper's sizes (default: %(default)s)")  # fmt: skip
    add("--out", type=Path, help="folder (default: reproduced/SCALE)")
    add("--record", metavar="NAME", type=_name, help="also put these rows into "
        "experiments/results/NAME.json, in place of rows of the same model, and rewrite "
        "docs/results.md; needs --subset valid or test")  # fmt: skip
    add("--subset", help="split to score (default: the recipe's, test)")
    add("--dry-run", action="store_true", help="print the commands, run none")
    return parser


def reproduce(args: argparse.Namespace, more: Sequence[str]) -> int:
    """Make a table; the exit code: 1 if a row failed."""
    table, out = TABLES[args.table], args.out or Path("reproduced") / args.scale
    plan = Plan(table, args.scale, out, tuple(more), args.subset)
    jobs = plan.jobs(args.rows)
    chosen = [row for row in plan.listed() if plan.name(row) in {job.name for job in jobs}]
    metrics = sorted({plan.metric(row) for row in chosen})
    seed_of(plan)
    if args.record and args.subset not in ("valid", "test"):
        raise RunsError(
            f"--record {args.record}: a result says which split it is of; add --subset valid or "
            "--subset test"
        )
    if args.record and len(metrics) > 1:
        raise RunsError(
            f"--record {args.record}: these rows have several metrics ({', '.join(metrics)}); "
            "choose rows of one of them by --rows"
        )
    if args.record:
        recorded(args.record, command_of(args.table, plan))
    for job in jobs:
        _check_same(job)
        print(f"# {job.name}" + (" (done)" if job.done() else ""))
        print("\n".join(job.commands()))
    if args.dry_run:
        return 0
    with working_in(out):
        results = run_jobs(jobs, line=lambda result: f"{result['score']:.2f}")
        everything = {job.name: job.done() or {} for job in plan.jobs()}
        rows = [row_facts(plan, row, everything[plan.name(row)]) for row in plan.listed()]
        data = {"table": args.table, "title": table.title, "scale": args.scale, "rows": rows}
        write_json(out / f"{args.table}.json", data)
        write_whole(out / f"{args.table}.md", markdown(table.title, args.scale, rows))
        print(f"{out / args.table}.md and {args.table}.json: written")
        names = {plan.name(row) for row in chosen}
        complete = [row for row in rows if row["name"] in names and row["score"] is not None]
        if args.record and complete:
            path = record(args.record, *as_results(args.table, plan, complete))
            print(f"{path} and docs/results.md: written")
    return 0 if all(results.get(job.name, {}).get("status") == DONE for job in jobs) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    return run_command(get_parser(), reproduce, argv)


if __name__ == "__main__":
    sys.exit(main())
