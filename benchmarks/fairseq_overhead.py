"""What DPQ costs in fairseq: updates per second of transformer_iwslt_de_en with DPQ on both tables
against full tables, in turn in one process; and how much later `fairseq-train --help` answers.

    python benchmarks/fairseq_overhead.py --rounds 12
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import torch
from fairseq_loop import FairseqRun, make_corpus, user_dir

# variant, flags, updates per second against the full tables'
DPQ = ["--dpq-K", "32", "--dpq-D", "64", "--dpq-embeddings", "all"]
SIDES = {
    "full": ([], None),
    "sx": (DPQ, 0.93),
    "vq": ([*DPQ, "--dpq-method", "vq"], 0.95),
}
HELP_LIMIT = 0.3  # seconds


def overhead(rounds: int, max_tokens: int) -> list[dict]:
    """Time updates of each variant in turn; every one sees the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        # The sizes of IWSLT14 De-En.
        lengths = torch.randint(10, 40, (2000,), generator=torch.Generator().manual_seed(1))
        make_corpus(Path(folder), "train", ("de", "en"), 8000, lengths.tolist())
        runs = {}
        for name, (flags, _) in SIDES.items():
            print(f"building {name}", file=sys.stderr)
            argv = [folder, "--arch", "transformer_iwslt_de_en", "--optimizer", "adam"]
            argv += ["--lr", "1e-4", "--max-tokens", str(max_tokens), "--num-workers", "0", *flags]
            with contextlib.redirect_stdout(io.StringIO()):
                runs[name] = FairseqRun(argv)
        sides = {name: (lambda number, run=run: run.step()) for name, run in runs.items()}
        times = harness.interleaved(sides, rounds, warm_up=2)
    rows = []
    for name, (_, target) in SIDES.items():
        seconds = statistics.median(times[name])
        # each round has one batch for all: ratios of the same batch, then their median
        speed = statistics.median(f / s for f, s in zip(times["full"], times[name]))
        rows.append({"variant": name, "seconds": seconds, "speed": speed, "target": target})
    return rows


def help_delay(rounds: int) -> float:
    """Seconds by which the plugin delays `fairseq-train --help`: medians of interleaved starts."""
    command = [shutil.which("fairseq-train", path=os.path.dirname(sys.executable)), "--help"]
    times: dict[str, list[float]] = {"stock": [], "plugin": []}
    for _ in range(rounds):
        for name, flags in (("stock", []), ("plugin", ["--user-dir", user_dir()])):
            start = os.times()
            subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
            end = os.times()
            cpu = end.children_user + end.children_system
            times[name].append(cpu - start.children_user - start.children_system)
            time.sleep(0.05)
    return statistics.median(times["plugin"]) - statistics.median(times["stock"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=7, help="of fairseq-train --help")
    args = parser.parse_args()
    harness.steady()
    harness.quiet()
    delay = help_delay(args.starts)
    rows = overhead(args.rounds, args.max_tokens)
    table = []
    for row in rows:
        target = row["target"]
        held = "-" if target is None else f">= {target}"
        held += "  MISSED" if target is not None and row["speed"] < target else ""
        table.append([row["variant"], f"{row['seconds']:.2f}", f"{row['speed']:.3f}", held])
    harness.show(
        "transformer_iwslt_de_en, both tables K = 32, D = 64, CPU seconds",
        ["variant", "s/update", "speed", "target"],
        table,
    )
    limit = harness.verdict(delay, HELP_LIMIT)
    harness.show(
        "fairseq-train --help", ["", "seconds later", "target"], [["plugin", f"{delay:.2f}", limit]]
    )
    harness.write("fairseq_overhead", [*rows, {"help_seconds_later": delay}])


if __name__ == "__main__":
    main()
