"""A program with fairseq-train's flags and log lines, and without its work: it shows what a sweep
does with runs that end, fail, hang or are killed. It goes on from `checkpoints/progress`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def log(kind: str, **entry: object) -> None:
    print(f"2026-01-01 00:00:00 | INFO | {kind} | {json.dumps(entry)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--save-dir", type=Path)
    parser.add_argument("--dpq-K", type=int, default=0)
    parser.add_argument("--dpq-D", type=int, default=0)
    parser.add_argument("--max-update", type=int, default=4)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds of an update")
    parser.add_argument("--slow", type=int, help="only updates of the run with this K wait")
    args, _ = parser.parse_known_args()
    folder = args.save_dir
    folder.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with (folder / "pids").open("a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    if args.dpq_D == 5:
        print("ValueError: --dpq-D 5 does not divide --encoder-embed-dim 64", flush=True)
        child.kill()
        sys.exit(1)
    lengths = {"optimization": {"max_epoch": 0, "max_update": args.max_update}}
    print(f"2026-01-01 00:00:00 | INFO | fairseq_cli.train | {lengths}", flush=True)
    progress = folder / "progress"
    first = int(progress.read_text()) if progress.exists() else 0
    for update in range(first + 1, args.max_update + 1):
        if args.slow in (None, args.dpq_K):
            time.sleep(args.wait)
        log("train_inner", epoch=1, update=update / 10, num_updates=str(update))
        progress.write_text(str(update))
        ppl = 1000 / (1 + args.dpq_K * args.dpq_D) + args.max_update - update
        log("valid", epoch=1, valid_ppl=f"{ppl:.2f}", valid_wps="9", valid_num_updates=str(update))
    print(
        "2026-01-01 00:00:00 | INFO | fairseq_cli.train | done training in 1.0 seconds", flush=True
    )
    child.kill()
    child.wait()


if __name__ == "__main__":
    main()
