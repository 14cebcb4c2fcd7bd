"""The native library against dense tables: lookup, logits, codes; ratios within one run, medians.
Usage: python benchmarks/native.py [--rounds N] [--part lookup small logits tiers codes]"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable

import harness

D_MODEL, IDS, K = 512, 4096, 32
LOOKUP = {128: 0.50, 64: 0.40, 32: 0.33}
PACKED = {128: 0.80, 64: 0.50, 32: 0.35}
HALF = {128: 0.30, 64: 0.25, 32: 0.20}
LOGITS = {1: 0.20, 5: 0.20, 64: 0.35}
SMALL, SMALL_PACKED, SMALL_REFERENCE = 1.2, 1.5, 2.5
TIERS = 1.3


def timed(
    sides: dict[str, Callable[[int], Any]], rounds: int, threads: int, repeat: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side: CPU time with one thread, wall time with several."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    return harness.interleaved(sides, rounds, repeat=repeat, clock=clock)


class Report:
    """Rows for the table on the screen and for the JSON file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def table(
        self, title: str, times: dict[str, list[float]], base: str, limits: dict[str, float]
    ) -> None:
        cells = []
        for name, taken in times.items():
            found = harness.ratio(times, name, base)
            microseconds = statistics.median(taken) * 1e6
            limit = limits.get(name)
            cells.append(
                [name, f"{microseconds:.1f}", f"{found:.2f}", harness.verdict(found, limit)]
            )
            row = {"table": title, "side": name, "us": microseconds, "ratio": found}
            self.rows.append({**row, "limit": limit})
        harness.show(title, ["", "us", "ratio", "limit"], cells)


def lookup(report: Report, rounds: int, threads: int, sizes: list[int]) -> None:
    import torch

    from fairseq_dpq import CompactEmbedding

    for n in sizes:
        full = torch.nn.Embedding.from_pretrained(torch.empty(n, D_MODEL).uniform_())
        ids = [torch.randint(n, (IDS,)) for _ in range(16)]
        floor = torch.zeros(())
        sides: dict[str, Callable[[int], Any]] = {
            "nn.Embedding": lambda i, full=full, ids=ids: full(ids[i % 16]),
            "write only": lambda i, floor=floor: floor.new_empty(IDS, D_MODEL).fill_(1),
        }
        limits = {}
        for D in LOOKUP:
            codes = torch.randint(K, (n, D), dtype=torch.uint8)
            values = torch.randn(D, K, D_MODEL // D)
            for name, packed, dtype, limit in (
                (f"D = {D}", False, torch.float32, LOOKUP[D]),
                (f"D = {D}, packed", True, torch.float32, PACKED[D]),
                (f"D = {D}, fp16", False, torch.float16, HALF[D]),
            ):
                form = CompactEmbedding.from_codes(codes, values.to(dtype), D_MODEL, packed=packed)
                limits[name] = limit
                sides[name] = lambda i, form=form, ids=ids: form(ids[i % 16])
        times = timed(sides, rounds, threads)
        title = f"Lookup of {IDS:,} ids, n = {n:,}, d = {D_MODEL}, K = {K}, {threads} thread(s)"
        report.table(title, times, "nn.Embedding", limits)


def in_pytorch(form: Any) -> Any:
    """The form, which goes on as it first looks rows up: without the library."""
    import torch

    with harness.without_library():
        form(torch.tensor([0]))
    return form


def small(report: Report, rounds: int, threads: int) -> None:
    import torch

    from fairseq_dpq import CompactEmbedding

    n, D = 32_000, 128
    full = torch.nn.Embedding(n, D_MODEL).requires_grad_(False)
    codes = torch.randint(K, (n, D), dtype=torch.uint8)
    values = torch.randn(D, K, D_MODEL // D)
    forms = [
        CompactEmbedding.from_codes(codes, values, D_MODEL, packed=packed)
        for packed in (False, True, False, True)
    ]
    for count in (1, 16):
        ids = [torch.randint(n, (count,)) for _ in range(16)]
        modules = {"nn.Embedding": full, "native": forms[0], "native, packed": forms[1]}
        modules["PyTorch"] = in_pytorch(forms[2])
        modules["PyTorch, packed"] = in_pytorch(forms[3])
        sides = {name: lambda i, m=m, ids=ids: m(ids[i % 16]) for name, m in modules.items()}
        limits = {"native": SMALL, "native, packed": SMALL_PACKED}
        if count == 1:
            limits["PyTorch"] = SMALL_REFERENCE
        times = timed(sides, rounds, 1, repeat=200)
        title = f"Lookup of {count} id(s), n = {n:,}, D = {D}, {threads} thread(s)"
        report.table(title, times, "nn.Embedding", limits)


def logits(report: Report, rounds: int, threads: int) -> None:
    import torch

    from fairseq_dpq import CodesLinear, CompactEmbedding
    from fairseq_dpq.forms.lookup import logits_by_partial_sums

    n = 32_000
    for batch, limit in LOGITS.items():
        table = torch.randn(n, D_MODEL)
        h = torch.randn(batch, D_MODEL)
        sides: dict[str, Callable[[int], Any]] = {
            "dense product": lambda i, h=h, table=table: torch.nn.functional.linear(h, table)
        }
        limits = {}
        for D in (64, 128):
            codes = torch.randint(K, (n, D), dtype=torch.uint8)
            values = torch.randn(D, K, D_MODEL // D)
            for packed in (False, True):
                form = CompactEmbedding.from_codes(codes, values, D_MODEL, packed=packed)
                name = f"D = {D}{', packed' if packed else ''}"
                limits[name] = limit
                output = CodesLinear(form)
                sides[name] = lambda i, layer=output, h=h: layer(h)
                if not packed:
                    sides[f"D = {D}, PyTorch"] = lambda i, f=form, h=h: logits_by_partial_sums(f, h)
        times = timed(sides, max(10, rounds // 4), threads)
        title = f"Logits of {batch} row(s), n = {n:,}, d = {D_MODEL}, K = {K}, {threads} thread(s)"
        report.table(title, times, "dense product", limits)


def tiers(report: Report, rounds: int, threads: int) -> None:
    """Five tiers, as `compress` chooses them for a table of 49,152 x 576, against one."""
    import torch

    from fairseq_dpq import CompactEmbedding
    from fairseq_dpq.forms.tiers import TieredEmbedding

    d = 576
    sizes = [(1612, 64, d), (5232, 16, d), (10330, 64, 288), (15962, 64, 192), (16016, 32, 144)]
    n = sum(rows for rows, _, _ in sizes)

    def one(rows: int, K: int, D: int) -> CompactEmbedding:
        codes = torch.randint(K, (rows, D), dtype=torch.uint8)
        return CompactEmbedding.from_codes(codes, torch.randn(D, K, d // D).half(), d, packed=True)

    form = TieredEmbedding(n, d, tiers=sizes, corrected=True)
    for i, size in enumerate(sizes):
        form.tiers[i] = one(*size)
    form.tier_of = form.tier_of[torch.randperm(n)]  # type: ignore[index]
    form.to("cpu")._set_tiers(sizes)
    table = torch.randn(n, d)
    plain = one(n, 64, 288).float()
    for count in (1, 128, IDS):
        ids = [torch.randint(n, (count,)) for _ in range(16)]
        modules = {"one tier, K = 64, D = 288": plain, "five tiers": form}
        sides = {name: lambda i, m=m, ids=ids: m(ids[i % 16]) for name, m in modules.items()}
        sides["nn.Embedding"] = lambda i, ids=ids: torch.nn.functional.embedding(ids[i % 16], table)
        times = timed(sides, max(10, rounds // 4), threads, repeat=200 if count == 1 else 1)
        title = f"Tiers: lookup of {count:,} id(s), n = {n:,}, d = {d}, {threads} thread(s)"
        report.table(title, times, "one tier, K = 64, D = 288", {"five tiers": TIERS})
    for batch in (1, 5, 64):
        h = torch.randn(batch, d)
        sides = {
            "one tier, K = 64, D = 288": lambda i, h=h: plain.logits(h),
            "five tiers": lambda i, h=h: form.logits(h),
            "dense product": lambda i, h=h: torch.nn.functional.linear(h, table),
        }
        times = timed(sides, max(10, rounds // 8), threads)
        title = f"Tiers: logits of {batch} row(s), n = {n:,}, d = {d}, {threads} thread(s)"
        report.table(title, times, "one tier, K = 64, D = 288", {"five tiers": TIERS})


def codes(report: Report, rounds: int, threads: int) -> None:
    import torch

    from fairseq_dpq.training.codes import evaluation_codes
    from fairseq_dpq.training.distances import DISTANCES, Stats

    n, D = 32_768, 128
    query, keys = torch.randn(n, D, D_MODEL // D), torch.randn(D, K, D_MODEL // D)
    stats = Stats(torch.randn(D, K), torch.rand(D, K))

    def alone(distance: Any) -> Any:
        with harness.without_library():
            return evaluation_codes(query, keys, distance, stats)

    for distance in DISTANCES.values():
        sides: dict[str, Callable[[int], Any]] = {
            "PyTorch": lambda i, x=distance: alone(x),
            "native": lambda i, x=distance: evaluation_codes(query, keys, x, stats),
        }
        times = timed(sides, max(3, rounds // 40), threads)
        title = (
            f"Codes of {n:,} x {D_MODEL}, K = {K}, D = {D}, {distance.name}, {threads} thread(s)"
        )
        report.table(title, times, "PyTorch", {})
        million = statistics.median(times["native"]) * 1e6 / n
        print(f"a million rows: {million:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="rounds that count")
    parser.add_argument(
        "--part", nargs="*", default=["lookup", "small", "logits", "tiers", "codes"]
    )
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--sizes", type=int, nargs="*", default=[32_000, 1_000_000])
    args = parser.parse_args()
    harness.steady()

    import torch

    from fairseq_dpq import native

    print(native.describe())
    torch.manual_seed(0)
    report = Report()
    with torch.no_grad():
        for threads in args.threads:
            torch.set_num_threads(threads)
            if "lookup" in args.part:
                lookup(report, args.rounds, threads, args.sizes)
            if "small" in args.part:
                small(report, args.rounds, threads)
            if "logits" in args.part:
                logits(report, args.rounds, threads)
            if "tiers" in args.part:
                tiers(report, args.rounds, threads)
            if "codes" in args.part:
                codes(report, args.rounds, threads)
    harness.write("native", report.rows)


if __name__ == "__main__":
    main()
