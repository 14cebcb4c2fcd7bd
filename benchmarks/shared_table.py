"""What DPQ costs where one table serves source, target and output: CPU time of all updates of the
demo's training, the three models in turn in one process, the warm-up and k-means among them.

    python benchmarks/shared_table.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from fairseq_loop import FairseqRun

LIMITS = {"full": None, "sx": 1.15, "vq": 1.10}


def measure(updates: int) -> dict[str, list[float]]:
    """CPU seconds of each update by model."""
    from experiments.demo import commands
    from experiments.demo.corpus import SPLITS, write_corpus

    setting = commands.Setting(updates=updates, tables="all", K=32, D=16)
    sizes = {split: getattr(setting, split) for split in SPLITS}
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", setting.seed, sizes)
        tool, *arguments = commands.preprocess(setting)
        command = [os.path.join(os.path.dirname(sys.executable), tool), *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        sides = {}
        for model in commands.MODELS:
            argv = commands.train(setting, model)[1:]
            argv[0] = f"{folder}/bin"
            with contextlib.redirect_stdout(io.StringIO()):
                run = FairseqRun(argv)
            sides[model.folder] = lambda number, run=run: run.step()
        with contextlib.redirect_stdout(io.StringIO()):
            return harness.interleaved(sides, updates, warm_up=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=800, help="default 800")
    args = parser.parse_args()
    harness.steady()
    harness.quiet()
    times = measure(args.updates)
    # A tied table is plain for a quarter of the updates; along half of them the ramp lasts.
    first, last = args.updates // 4, args.updates // 4 + args.updates // 2
    phases = {"plain": slice(0, first), "ramp": slice(first, last), "codes": slice(last, None)}
    table, rows = [], []
    for name, limit in LIMITS.items():
        whole = sum(times[name]) / sum(times["full"])
        parts = [
            harness.ratio({n: t[p] for n, t in times.items()}, name, "full")
            for p in phases.values()
        ]
        ms = 1000 * sum(times[name]) / args.updates
        verdict = harness.verdict(whole, limit)
        table.append(
            [name, f"{ms:.1f}", *(f"{part:.2f}" for part in parts), f"{whole:.3f}", verdict]
        )
        rows.append(
            {"model": name, "ms": ms, **dict(zip(phases, parts)), "ratio": whole, "limit": limit}
        )
    header = ["model", "ms/update", *phases, "all updates", "target"]
    harness.show("one shared table, K = 32, D = 16, against the full table", header, table)
    harness.write("shared_table", rows)


if __name__ == "__main__":
    main()
