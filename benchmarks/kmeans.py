"""Product quantisation of large tables: k-means on 32,768 rows, 15 rounds, then the codes of all
rows; CPU seconds of all threads, and the parts of one round against PyTorch.
Usage: python benchmarks/kmeans.py [--threads N] [--part round|whole|compress]"""

from __future__ import annotations

import argparse
import time
from typing import Any

import harness

K, SAMPLE, ROUNDS = 256, 32_768, 15
WHOLE = ((256_000, 640, 160, 30.0), (256_000, 640, 320, 30.0), (1_000_000, 256, 64, 60.0))


def one_round() -> list[dict[str, Any]]:
    import torch

    from fairseq_dpq.training import kmeans

    rows = []
    for d, D in ((640, 160), (640, 320), (256, 16)):
        points = torch.randn(8192, D, d // D).transpose(0, 1)
        centroids = torch.randn(D, K, d // D)

        def alone(i: int, points: Any = points, centroids: Any = centroids) -> Any:
            with harness.without_library():
                return kmeans._round(points, centroids, None)

        def ours(i: int, points: Any = points, centroids: Any = centroids) -> Any:
            return kmeans._round(points, centroids, None)

        times = harness.interleaved({"PyTorch": alone, "native": ours}, 5, 1)
        found = harness.ratio(times, "native", "PyTorch")
        rows.append({"d": d, "D": D, "ratio": found, "ms": 1e3 * min(times["native"])})
    cells = [[f"{r['d']} / {r['D']}", f"{r['ms']:.1f}", f"{r['ratio']:.3f}"] for r in rows]
    harness.show(f"A round over 8,192 rows, K = {K}", ["d / D", "native ms", "ratio"], cells)
    return rows


def whole() -> list[dict[str, Any]]:
    import torch

    from fairseq_dpq import native
    from fairseq_dpq.training.kmeans import kmeans

    rows = []
    for n, d, D, limit in WHOLE:
        points = torch.randn(n, d).view(n, D, -1)
        start = time.process_time()
        centroids = kmeans(points.transpose(0, 1), K, iterations=ROUNDS, max_points=SAMPLE)
        middle = time.process_time()
        native.nearest(points, centroids)
        end = time.process_time()
        row = {"n": n, "d": d, "D": D, "kmeans": middle - start, "codes": end - middle}
        rows.append({**row, "total": end - start, "limit": limit})
    cells = []
    for r in rows:
        seconds = [f"{r[part]:.1f}" for part in ("kmeans", "codes", "total")]
        held = harness.verdict(r["total"], r["limit"])
        cells.append([f"{r['n']:,} x {r['d']}", str(r["D"]), *seconds, held])
    header = ["table", "D", "k-means", "codes", "total", "limit"]
    harness.show(f"CPU seconds, K = {K}, {torch.get_num_threads()} thread(s)", header, cells)
    return rows


COMPRESS = """
import resource, sys, time, torch
from fairseq_dpq import compress
n, d = map(int, sys.argv[1:])
model = torch.nn.Sequential(torch.nn.Embedding(n, d))
base, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
compress(model)
print(time.process_time() - start, base * 1024)
"""


def compressed() -> list[dict[str, Any]]:
    """`compress` of whole models: CPU seconds, and peak memory beyond the model's."""
    rows = []
    for n, d, limit in ((256_000, 640, 30.0), (1_000_000, 256, 60.0)):
        text, peak = harness.peak_memory(COMPRESS, [str(n), str(d)])
        seconds, base = map(float, text.split())
        rows.append({"n": n, "d": d, "seconds": seconds, "beyond": peak - base, "limit": limit})
    cells = []
    for r in rows:
        beyond = r["beyond"] / 1e9
        held = [harness.verdict(r["seconds"], r["limit"]), harness.verdict(beyond, 0.5)]
        cells.append([f"{r['n']:,} x {r['d']}", f"{r['seconds']:.1f}", f"{beyond:.2f}", *held])
    header = ["table", "CPU seconds", "GB beyond the model", "limit", "limit"]
    harness.show("compress(model), the default ratio", header, cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="*", default=["round", "whole", "compress"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    harness.steady()

    import torch

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    rows = one_round() if "round" in args.part else []
    rows += whole() if "whole" in args.part else []
    harness.write("kmeans", rows + (compressed() if "compress" in args.part else []))


if __name__ == "__main__":
    main()
