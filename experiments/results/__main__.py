"""python -m experiments.results: write docs/results.md and the picture from the data.

The picture is BLEU against bytes on the demo corpus: full table, DPQ, and what others do. Each row
is the demo's model, trained once, stored, and used to translate the test set.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from experiments.demo import commands, table
from experiments.demo.commands import Model, Setting
from experiments.demo.corpus import TARGET
from experiments.demo.run import jobs as demo_jobs
from experiments.results import HERE, PAGE, ROOT, load, markdown, provenance
from experiments.score import bleu, read_lines, read_translations
from fairseq_dpq.figures import style
from fairseq_dpq.runs.folder import RunsError, working_in, write_whole
from fairseq_dpq.runs.runner import Facts, Job, Step, run_jobs
from fairseq_dpq.sweeps.figures import mark_bytes

FIGURE = "demo_sizes"
DATA = HERE / f"{FIGURE}.json"
SIZES = ((8, 16), (8, 32))  # K, D
FULL, TIERS, PQ, SCALAR, LOW_RANK = (
    "full table",
    "tiers after training",
    "product quantisation after training",
    "scalar quantisation after training",
    "low rank, trained",
)
MARKERS = {"DPQ-SX": "o", "DPQ-VQ": "s", TIERS: "p", PQ: "^", SCALAR: "v", LOW_RANK: "D"}


def rows() -> list[tuple[str, str, str, str, str]]:
    """Name, family, label, flags of training, flags of fairseq-dpq-quantize."""
    out = [("full", FULL, "", "", "")]
    for K, D in SIZES:
        size, label = f"--dpq-K {K} --dpq-D {D}", f"K={K} D={D}"
        for method in ("sx", "vq"):
            flags = f"{size} --dpq-method {method}"
            out.append((f"{method}-{K}-{D}", f"DPQ-{method.upper()}", label, flags, ""))
        out.append((f"pq-{K}-{D}", PQ, label, "", size))
    for ratio in (12, 20):
        flags = f"--form tiers --ratio {ratio} --calibrate bin"
        out.append((f"tiers-{ratio}", TIERS, f"ratio {ratio}", "", flags))
    for bits in (8, 4, 2):
        flags = f"--form scalar --bits {bits}"
        out.append((f"scalar-{bits}", SCALAR, f"{bits} bits", "", flags))
    for rank in (3, 6):
        flags = f"--dpq-method low_rank --dpq-rank {rank}"
        out.append((f"rank-{rank}", LOW_RANK, f"rank {rank}", flags, ""))
    return out


def _job(out: Path, setting: Setting, name: str, training: str, quantizing: str) -> Job:
    steps, stored, after = [], f"{name}/checkpoint_best.pt", "data"
    if quantizing:
        trained, stored, after = "full/checkpoint_best.pt", f"{name}.pt", "full"
        words = ["fairseq-dpq-quantize", trained, stored, *quantizing.split(), "--force"]
        steps.append(Step("store", words, cwd=out))
    else:
        words = commands.train(setting, Model(name, name), training)
        steps.append(Step("train", words, cwd=out, weight=10))
    if training:
        trained, stored = stored, f"{name}.pt"
        words = ["fairseq-dpq-compact", trained, stored, "--force"]
        steps.append(Step("store", words, cwd=out))
    words = commands.generate(Model(name, name))
    words[words.index("--path") + 1] = stored
    steps.append(Step("generate", words, cwd=out))

    def finish(path: Path, job: Job, facts: list[Facts]) -> Facts:
        found = read_translations(job.folder / "generate.log")
        score = bleu(found, read_lines(out / "corpus" / f"test.{TARGET}"), "none")["BLEU"]
        return {"bytes": table.measure(path)[0], "bleu": round(score, 2)}

    return Job(name, out / "logs" / name, steps, partial(finish, out / stored), (after,))


def measure(out: Path) -> None:
    """Train, store and translate; what an earlier call did is kept."""
    setting = Setting()
    with working_in(out):
        todo = [demo_jobs(out, setting)[0]]
        todo += [_job(out, setting, name, *flags) for name, _, _, *flags in rows()]
        results = run_jobs(todo, threads=1)
    found: list[dict[str, Any]] = []
    for name, family, label, *_ in rows():
        if "bleu" not in results.get(name, {}):
            raise RunsError(f"{name} failed: {results.get(name, {}).get('error')}")
        score, size = results[name]["bleu"], results[name]["bytes"]
        row: dict[str, Any] = {"model": f"{family}, {label}" if label else family, "data": "demo"}
        row.update(family=family, label=label, seeds=[setting.model_seed], test=score)
        ratio = round(results["full"]["bytes"] / size, 1)
        found.append({**row, "table_bytes": size, "ratio": ratio})
    data = json.loads(DATA.read_text(encoding="utf-8"))
    data = {**data, **provenance(), "rows": found}
    write_whole(DATA, json.dumps(data, indent=1) + "\n")


def draw() -> list[Path]:
    """BLEU of the test set against the bytes of the table; the full table as a dashed line."""
    found: list[dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))["rows"]
    with style.figure((7.2, 3.6)) as figure:
        axes = figure.subplots()
        (full,) = (row for row in found if row["family"] == FULL)
        ink = style.LIGHT.ink
        axes.axhline(full["test"], color=ink, linestyle="--", linewidth=1)
        axes.plot(full["table_bytes"], full["test"], "*", color=ink, markersize=9, label=FULL)
        for (family, marker), colour in zip(MARKERS.items(), style.LIGHT.series):
            mine = sorted(
                (row for row in found if row["family"] == family),
                key=lambda row: row["table_bytes"],
            )
            x, y = [row["table_bytes"] for row in mine], [row["test"] for row in mine]
            axes.plot(x, y, marker=marker, color=colour, linewidth=1.2, label=family)
        axes.set_xscale("log")
        mark_bytes(axes)
        axes.set_ylim(50, 100)
        axes.set_xlabel("size of the embedding table")
        axes.set_ylabel("BLEU of the test set")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.02))
        return style.save(figure, ROOT / "docs" / "figures" / FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.results", description=__doc__)
    parser.add_argument(
        "--measure-figure",
        type=Path,
        metavar="DIR",
        help="first measure BLEU against bytes on the demo corpus (about 12 minutes of one core; "
        "run again, it goes on)",
    )
    args = parser.parse_args()
    if args.measure_figure is not None:
        measure(args.measure_figure.absolute())
    write_whole(PAGE, markdown(load()))
    for path in (PAGE, *draw()):
        print(path)


if __name__ == "__main__":
    main()
