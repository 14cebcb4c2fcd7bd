"""Peak memory of codes() and compact() for a vocabulary of a million: n = 1,000,000, d = 512,
K = 32, D = 128. Each is measured in a process of its own, as peak RSS beyond the built layer."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import harness

D_MODEL, K, D = 512, 32, 128
LIMIT = 1e9  # bytes beyond the query matrix


def peak() -> int:
    """The most resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(what: str, n: int) -> None:
    """In a process of its own: build a layer, call one method, print what it took as JSON."""
    import torch

    from fairseq_dpq import DPQEmbedding

    torch.set_num_threads(1)
    layer = DPQEmbedding(n, D_MODEL, 1, K=K, D=D)
    layer(torch.arange(2000))  # statistics of real responses; loads what a first call loads
    layer.eval()
    built = peak()
    calls = {
        "codes()": layer.codes,
        "compact()": layer.compact,
        "compact(packed=True)": lambda **k: layer.compact(packed=True, **k),
    }
    done = 0
    shown = 0.0

    def progress(rows: int) -> None:
        nonlocal done, shown
        done += rows
        if time.monotonic() - shown > 1 and sys.stderr.isatty():
            shown = time.monotonic()
            print(f"\r{what} {done:,} of {n:,} rows", end="", file=sys.stderr)

    start = time.perf_counter()
    result = calls[what](progress=progress)
    seconds = time.perf_counter() - start
    print(json.dumps({"bytes": peak() - built, "built": built, "seconds": seconds}))
    del result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1_000_000, help="vocabulary size")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.n)
        return
    rows, table = [], []
    for what in ("codes()", "compact()", "compact(packed=True)"):
        done = subprocess.run(
            [sys.executable, __file__, "--measure", what, "--n", str(args.n)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append({"call": what, "n": args.n, "limit": LIMIT, **found})
        limit = f"< {LIMIT / 1e6:.0f}" + ("" if found["bytes"] < LIMIT else "  MISSED")
        table.append([what, f"{found['bytes'] / 1e6:.0f}", limit, f"{found['seconds']:.0f}"])
    header = ["call", "MB", "limit", "seconds"]
    query = args.n * D_MODEL * 4 / 1e6
    harness.show(
        f"Peak RSS beyond a layer with {args.n:,} rows (query matrix {query:,.0f} MB)",
        header,
        table,
    )
    harness.write("memory", rows)


if __name__ == "__main__":
    main()
