"""Compaction: bytes at the paper's shapes (--shapes), or time and memory for a million rows.

python benchmarks/compaction.py             1,000,000 x 512, K=32, D=128: needs 3 GB of disk
python benchmarks/compaction.py --shapes    formula and measured bytes, side by side
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import torch

from fairseq_dpq import DPQEmbedding, native
from fairseq_dpq.fairseq_plugin.configs import write_record
from fairseq_dpq.files.record import Table, TablesRecord

# (n, d, K, D, shared): language models on PTB, small and medium; WMT19 translation
SHAPES = [
    (10_000, 200, 8, 25, True),
    (10_000, 650, 32, 50, True),
    (32_000, 512, 32, 128, False),
]
PATH = "encoder.embed_tokens"
# Limits with the native library: seconds of CPU time on one core, bytes
CODES, COMPACT, BEYOND = 8, 30, 0.6e9


def write_checkpoint(file: Path, layer: DPQEmbedding, optimizer: bool) -> None:
    """A fairseq training checkpoint with this table and next to nothing else."""
    shape = (layer.num_embeddings, layer.embedding_dim, layer.padding_idx)
    cfg = argparse.Namespace(arch="transformer", dpq_K=layer.config.K)
    write_record(cfg, TablesRecord({PATH: Table(*shape, layer.config.keywords())}))
    state = {
        "args": None,
        "cfg": {"model": cfg, "task": None},
        "model": {f"{PATH}.{key}": value for key, value in layer.state_dict().items()},
        "optimizer_history": [{"criterion_name": "CrossEntropyCriterion", "num_updates": 1}],
        "extra_state": {},
    }
    if optimizer:
        moment = torch.zeros_like(layer.query)
        state["last_optimizer_state"] = {"state": {0: {"m": moment, "v": moment.clone()}}}
    torch.save(state, file)


def compact(source: Path, target: Path, *flags: str) -> dict:
    """Run the tool as a user does; its JSON, the seconds and the peak memory in bytes."""
    code = "import sys; from fairseq_dpq.cli.compact import main; main(sys.argv[1:])"
    before = _children_seconds()
    text, peak = harness.peak_memory(code, [str(source), str(target), "--json", *flags])
    return {**json.loads(text), "seconds": _children_seconds() - before, "peak": peak}


def _children_seconds() -> float:
    """CPU time of all commands so far, which other programs on the machine do not change."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shapes(folder: Path) -> None:
    """The paper's row shapes: bytes by the formula and as measured in the file."""
    print(
        "| n x d | K | D | shared | formula bytes | measured | ratio | formula CR | measured CR |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for n, d, K, D, shared in SHAPES:
        layer = DPQEmbedding(n, d, 1, K=K, D=D, share_subspaces=shared)
        source, target = folder / "in.pt", folder / "out.pt"
        write_checkpoint(source, layer, optimizer=False)
        row = compact(source, target, "--force")["embeddings"][0]
        formula, measured = row["formula_bytes"], row["compact_bytes"]
        print(
            f"| {n:,} x {d} | {K} | {D} | {'yes' if shared else 'no'} | {formula:,.0f} "
            f"| {measured:,} | {measured / formula:.4f} | {row['formula_cr']:.1f} "
            f"| {row['measured_cr']:.1f} |"
        )


def million(folder: Path, args: argparse.Namespace) -> None:
    """CPU time of codes and of the whole command; memory against the file's size."""
    layer = DPQEmbedding(args.rows, args.dim, 1, K=args.K, D=args.D).eval()
    source, target = folder / "in.pt", folder / "out.pt"
    print(f"writing {source} ...", flush=True)
    write_checkpoint(source, layer, args.optimizer)
    start = time.process_time()
    layer.codes()
    codes = time.process_time() - start
    del layer
    base = compact_start()
    result = compact(source, target)
    size = source.stat().st_size
    beyond = result["peak"] - size
    print(f"table {args.rows:,} x {args.dim}, K={args.K}, D={args.D}; file {size:,} bytes")
    print(native.describe())
    print(f"codes of all rows             {codes:8.1f} s (at most {CODES:g}), CPU time")
    print(
        f"fairseq-dpq-compact, verified {result['seconds']:8.1f} s (at most {COMPACT:g}), "
        f"{base:.1f} s of it start-up"
    )
    print(f"peak memory beyond the file   {beyond / 1e9:8.2f} GB (at most {BEYOND / 1e9:g})")
    row = result["embeddings"][0]
    print(f"bytes / formula               {row['compact_bytes'] / row['formula_bytes']:8.4f}")
    if codes > CODES or result["seconds"] > COMPACT or beyond > BEYOND:
        sys.exit("the tool is slower or larger than it may be")


def compact_start() -> float:
    """Seconds that the tool takes to start."""
    before = _children_seconds()
    command = [sys.executable, "-m", "fairseq_dpq.cli.compact", "--help"]
    subprocess.run(command, check=True, capture_output=True)
    return _children_seconds() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", action="store_true", help="bytes at the paper's shapes")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--K", type=int, default=32)
    parser.add_argument("--D", type=int, default=128)
    parser.add_argument("--optimizer", action="store_true", help="with Adam's state: 3x the file")
    parser.add_argument("--folder", help="where the large files go (default: a temporary one)")
    args = parser.parse_args()
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.shapes:
            shapes(Path(folder))
        else:
            million(Path(folder), args)


if __name__ == "__main__":
    main()
