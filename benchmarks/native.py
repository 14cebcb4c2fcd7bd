"""The native library against dense tables: lookup, logits, codes; ratios within one run, medians.
Usage: python benchmarks/native.py [--rounds N] [--part lookup|small|logits|codes] [--threads N]"""

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
LOGITS = {1: 0.20, 5: 0.20, 64: 0.40}
SMALL, SMALL_PACKED, SMALL_REFERENCE = 1.2, 1.5, 2.5


def timed(
    sides: dict[str, Callable[[int], Any]], rounds: int, threads: int, repeat: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side: CPU time with one thread, wall time with several."""
    if threads == 1 and repeat == 1:
        return harness.interleaved(sides, rounds)
    clock = time.thread_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-5, rounds):
        for name, side in sides.items():
            start = clock()
            for i in range(repeat):
                side(number + i)
            if number >= 0:
                times[name].append((clock() - start) / repeat)
    return times


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


def peers(table: Any, codes: Any, values: Any) -> dict[str, Callable[[Any], Any]]:
    """Other compressed lookups that are installed here: torch's int8 embedding, faiss's decoder."""
    import torch

    found: dict[str, Callable[[Any], Any]] = {}
    packed = torch.ops.quantized.embedding_bag_byte_prepack(table)
    offsets = torch.arange(IDS)
    found["torch int8 embedding"] = lambda ids: (
        torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            packed, ids, offsets[: ids.numel()], False, 0, False, None, None, False
        )
    )
    try:
        import faiss
    except ImportError:
        return found
    D = codes.shape[1]
    pq = faiss.ProductQuantizer(D_MODEL, D, 5)
    faiss.copy_array_to_vector(values.reshape(-1).numpy(), pq.centroids)
    stored = pq.compute_codes(table[:IDS].numpy())
    found["faiss decode, rows in order"] = lambda ids: pq.decode(stored[: ids.numel()])
    return found


def lookup(report: Report, rounds: int, threads: int, sizes: list[int]) -> None:
    import torch

    from fairseq_dpq import CompactEmbedding, native

    for n in sizes:
        full = torch.nn.Embedding.from_pretrained(torch.empty(n, D_MODEL).uniform_())
        ids = [torch.randint(n, (IDS,)) for _ in range(16)]
        floor = torch.zeros(())
        sides: dict[str, Callable[[int], Any]] = {
            "nn.Embedding": lambda i, full=full, ids=ids: full(ids[i % 16]),
            "write only": lambda i, floor=floor: floor.new_empty(IDS, D_MODEL).fill_(1),
        }
        limits = {}
        kept = []
        for D in LOOKUP:
            codes = torch.randint(K, (n, D), dtype=torch.uint8)
            values = torch.randn(D, K, D_MODEL // D)
            if D == 64 and n <= 100_000:
                for name, peer in peers(full.weight.data, codes, values).items():
                    sides[name] = lambda i, peer=peer, ids=ids: peer(ids[i % 16])
            for name, packed, dtype, limit in (
                (f"D = {D}", False, torch.float32, LOOKUP[D]),
                (f"D = {D}, packed", True, torch.float32, PACKED[D]),
                (f"D = {D}, fp16", False, torch.float16, HALF[D]),
            ):
                form = CompactEmbedding.from_codes(codes, values.to(dtype), D_MODEL, packed=packed)
                table = _table(form, native)
                kept.append(form)
                limits[name] = limit
                sides[name] = lambda i, t=table, f=form, ids=ids: t.lookup(
                    f.codes, f.values, ids[i % 16]
                )
        times = timed(sides, rounds, threads)
        title = f"Lookup of {IDS:,} ids, n = {n:,}, d = {D_MODEL}, K = {K}, {threads} thread(s)"
        report.table(title, times, "nn.Embedding", limits)


def _table(form: Any, native: Any) -> Any:
    return native.table(
        form.codes,
        form.values,
        form.sizes,
        shared=form.share_subspaces,
        packed=form.packed,
        padding_idx=form.padding_idx,
    )


def small(report: Report, rounds: int, threads: int) -> None:
    import torch

    from fairseq_dpq import CompactEmbedding, native
    from fairseq_dpq.native import reference

    n, D = 32_000, 128

    class Native(torch.nn.Module):
        def __init__(self, form: CompactEmbedding) -> None:
            super().__init__()
            self.register_buffer("codes", form.codes)
            self.register_buffer("values", form.values)
            self.table = _table(form, native)

        def forward(self, indices: Any) -> Any:
            buffers = self._buffers
            return self.table.lookup(buffers["codes"], buffers["values"], indices)

    class Reference(torch.nn.Module):
        def __init__(self, form: CompactEmbedding) -> None:
            super().__init__()
            self.layout = reference.Layout(
                form.codes, form.values, form.sizes, form.share_subspaces, form.packed, None
            )

        def forward(self, indices: Any) -> Any:
            return reference.lookup(self.layout, indices)

    full = torch.nn.Embedding(n, D_MODEL).requires_grad_(False)
    codes = torch.randint(K, (n, D), dtype=torch.uint8)
    values = torch.randn(D, K, D_MODEL // D)
    forms = [CompactEmbedding.from_codes(codes, values, D_MODEL, packed=p) for p in (False, True)]
    for count in (1, 16):
        ids = [torch.randint(n, (count,)) for _ in range(16)]
        modules = {"nn.Embedding": full, "native": Native(forms[0])}
        modules["native, packed"] = Native(forms[1])
        modules["PyTorch"] = Reference(forms[0])
        modules["PyTorch, packed"] = Reference(forms[1])
        sides = {name: lambda i, m=m, ids=ids: m(ids[i % 16]) for name, m in modules.items()}
        limits = {"native": SMALL, "native, packed": SMALL_PACKED}
        if count == 1:
            limits["PyTorch"] = SMALL_REFERENCE
        times = timed(sides, rounds, 1, repeat=200)
        report.table(f"Lookup of {count} id(s), n = {n:,}, D = {D}", times, "nn.Embedding", limits)


def logits(report: Report, rounds: int, threads: int) -> None:
    import torch

    from fairseq_dpq import CompactEmbedding, native
    from fairseq_dpq.native import reference

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
                own = _table(form, native)
                name = f"D = {D}{', packed' if packed else ''}"
                limits[name] = limit
                sides[name] = lambda i, t=own, f=form, h=h: t.logits(f.codes, f.values, h)
                if not packed:
                    layout = reference.Layout(
                        form.codes, form.values, form.sizes, False, False, None
                    )
                    sides[f"D = {D}, PyTorch"] = lambda i, x=layout, h=h: reference.logits(x, h)
        times = timed(sides, max(10, rounds // 4), threads)
        title = f"Logits of {batch} row(s), n = {n:,}, d = {D_MODEL}, K = {K}, {threads} thread(s)"
        report.table(title, times, "dense product", limits)


def codes(report: Report, rounds: int, threads: int) -> None:
    import torch

    from fairseq_dpq import native, quantizer

    n, D = 32_768, 128
    query, keys = torch.randn(n, D, D_MODEL // D), torch.randn(D, K, D_MODEL // D)
    stats = quantizer.Stats(torch.randn(D, K), torch.rand(D, K))
    scale = quantizer._scale(stats)
    for distance in ("dot", "euclidean", "cosine"):
        sides: dict[str, Callable[[int], Any]] = {
            "PyTorch": lambda i, x=distance: quantizer.evaluation_codes(query, keys, x, stats),
            "native": lambda i, x=distance: native.codes(
                query, keys, x, stats.mean, scale, torch.uint8
            ),
        }
        times = timed(sides, max(3, rounds // 40), threads)
        title = f"Codes of {n:,} x {D_MODEL}, K = {K}, D = {D}, {distance}, {threads} thread(s)"
        report.table(title, times, "PyTorch", {})
        million = statistics.median(times["native"]) * 1e6 / n
        print(f"a million rows: {million:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="rounds that count")
    parser.add_argument("--part", nargs="*", default=["lookup", "small", "logits", "codes"])
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
            if "small" in args.part and threads == 1:
                small(report, args.rounds, threads)
            if "logits" in args.part:
                logits(report, args.rounds, threads)
            if "codes" in args.part:
                codes(report, args.rounds, threads)
    harness.write("native", report.rows)


if __name__ == "__main__":
    main()
