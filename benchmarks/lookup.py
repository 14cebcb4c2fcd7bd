"""Lookup of CompactEmbedding against nn.Embedding: d = 512, 4,096 random ids, single thread.
Usage: python benchmarks/lookup.py [--rounds N]"""

from __future__ import annotations

import argparse
import statistics

import harness

D_MODEL, IDS, K = 512, 4096, 32
LIMITS = {128: 1.3, 64: 0.8}  # unpacked against float32 nn.Embedding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="rounds that count")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[32_000, 1_000_000], help="vocabulary sizes"
    )
    args = parser.parse_args()
    harness.steady()

    import torch

    from fairseq_dpq import CompactEmbedding

    torch.manual_seed(0)
    rows, table = [], []
    for n in args.sizes:
        full = torch.nn.Embedding.from_pretrained(torch.empty(n, D_MODEL).uniform_())
        # new ids in each round: what is measured is a table that is not in cache already
        ids = [torch.randint(n, (IDS,)) for _ in range(16)]
        forms = {}
        for D in LIMITS:
            codes = torch.randint(K, (n, D), dtype=torch.uint8)
            values = torch.randn(D, K, D_MODEL // D)
            for packed in (False, True):
                name = f"D = {D}{', packed' if packed else ''}"
                forms[name] = CompactEmbedding.from_codes(codes, values, D_MODEL, packed=packed)
        with torch.no_grad():
            sides = {"full": lambda i, full=full, ids=ids: full(ids[i % 16])}
            for name, form in forms.items():
                sides[name] = lambda i, form=form, ids=ids: form(ids[i % 16])
            times = harness.interleaved(sides, args.rounds)
        base = statistics.median(times["full"])
        table.append([f"{n:,}", "nn.Embedding", f"{base * 1e3:.2f}", "1.00", "-", f"{n * 2048:,}"])
        for name, form in forms.items():
            found = harness.ratio(times, name, "full")
            limit = None if form.packed else LIMITS[form.D]
            cells = [f"{statistics.median(times[name]) * 1e3:.2f}", f"{found:.2f}"]
            cells += [harness.verdict(found, limit), f"{form.nbytes:,}"]
            table.append([f"{n:,}", f"K = {K}, {name}", *cells])
            rows.append(
                {
                    "n": n,
                    "K": K,
                    "D": form.D,
                    "packed": form.packed,
                    "ms": statistics.median(times[name]) * 1e3,
                    "full_ms": base * 1e3,
                    "ratio": found,
                    "limit": limit,
                    "bytes": form.nbytes,
                }
            )
        del full, forms, sides
    header = ["n", "form", "ms", "ratio", "limit", "bytes in memory"]
    harness.show(f"Lookup of {IDS:,} ids, d = {D_MODEL}, one thread", header, table)
    harness.write("lookup", rows)


if __name__ == "__main__":
    main()
