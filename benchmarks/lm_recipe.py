"""Tokens per second of the LSTM language-model recipe: plain PyTorch loop, fairseq, fairseq + DPQ.
All variants take turns inside one process, so that a busy machine slows them alike.

    python benchmarks/lm_recipe.py --size small --rounds 9 --updates 10

Prints a table and writes benchmarks/results/lm_recipe.json. Ratios are given by the wall clock and
by processor time, which other processes on the machine do not disturb as much. `plain` is the same
nn.LSTM model in a loop without fairseq; the others run fairseq's trainer, iterators and metrics as
fairseq-train does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Protocol

import harness
import torch
import torch.nn.functional as F
from fairseq_loop import FairseqRun, make_corpus
from torch import Tensor, nn

# units, steps, dropout, init range, clip
SIZES = {
    "small": (200, 20, 0.0, 0.1, 3.0),
    "medium": (650, 35, 0.5, 0.05, 5.0),
    "large": (1500, 35, 0.65, 0.04, 5.0),
}
# K and D, shared subspaces
DPQ = {
    "small": {"sx": (8, 25), "vq": (32, 25)},
    "medium": {"sx": (32, 50), "vq": (128, 50)},
    "large": {"sx": (16, 50), "vq": (16, 50)},
}
VARIANTS = ("plain", "full", "sx", "vq")
# variant, what it is compared with, the ratio of tokens per second that should hold
TARGETS = (("full", "plain", 0.9), ("sx", "full", 0.93), ("vq", "full", 0.95))
LANES = 20


class Run(Protocol):
    def step(self) -> int:
        """One update; the number of tokens it saw."""


class PlainLM(nn.Module):
    def __init__(self, types: int, units: int, dropout: float, init: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(types, units)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(units, units, 2, dropout=dropout)
        self.out = nn.Linear(units, types)
        for p in self.parameters():
            nn.init.uniform_(p, -init, init)

    def forward(
        self, tokens: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, state = self.lstm(self.dropout(self.embed(tokens)), state)  # (steps, lanes, units)
        return self.out(self.dropout(x)), state


class PlainRun:
    """What one would write without fairseq."""

    def __init__(self, stream: Tensor, types: int, size: str) -> None:
        units, self.steps, dropout, init, self.clip = SIZES[size]
        lane = len(stream) // LANES
        self.data = stream[: lane * LANES].view(LANES, lane).t().contiguous()  # (time, lanes)
        self.model = PlainLM(types, units, dropout, init).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.state: tuple[Tensor, Tensor] | None = None
        self.at = 0
        self.total = 0.0

    def step(self) -> int:
        if self.at + self.steps + 1 > len(self.data):
            self.at, self.state = 0, None
        source = self.data[self.at : self.at + self.steps]
        target = self.data[self.at + 1 : self.at + self.steps + 1]
        self.at += self.steps
        if self.state is not None:
            self.state = (self.state[0].detach(), self.state[1].detach())
        self.optimizer.zero_grad()
        logits, self.state = self.model(source, self.state)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        (loss / LANES).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.total += loss.item()
        return target.numel()


def recipe(data: Path, size: str, flags: list[str]) -> list[str]:
    """The recipe's arguments of fairseq-train."""
    _, steps, _, _, clip = SIZES[size]
    return [
        str(data), "--task", "stateful_lm", "--arch", f"zaremba_lstm_lm_{size}",
        "--tokens-per-sample", str(steps), "--batch-size", str(LANES), "--optimizer", "sgd",
        "--lr", "1.0", "--clip-norm", str(clip), *flags,
    ]  # fmt: skip


def build(name: str, data: Path, size: str) -> Run:
    if name == "plain":
        from fairseq.data import Dictionary, data_utils

        dictionary = Dictionary.load(str(data / "dict.txt"))
        lines = data_utils.load_indexed_dataset(str(data / "train"), dictionary)
        stream = torch.cat([lines[i].long() for i in range(len(lines))])
        return PlainRun(stream, len(dictionary), size)
    flags = []
    if name != "full":
        K, D = DPQ[size][name]
        flags = ["--dpq-K", str(K), "--dpq-D", str(D), "--dpq-share-subspaces"]
        flags += ["--dpq-method", name]
    return FairseqRun(recipe(data, size, flags))


def measure(
    runs: dict[str, Run], rounds: int, updates: int, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second, and per second of processor time, of each variant in each round.
    The variant that opens a round changes."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_speeds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for run in runs.values():  # warm up
        run.step()
        run.step()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start, cpu_start = time.perf_counter(), time.process_time()
            tokens = sum(runs[name].step() for _ in range(updates))
            speeds[name].append(tokens / (time.perf_counter() - start))
            cpu_speeds[name].append(tokens / (time.process_time() - cpu_start))
        say(f"round {i + 1}/{rounds}: " + ", ".join(f"{n} {speeds[n][-1]:,.0f}" for n in names))
    return speeds, cpu_speeds


def summarise(speeds: dict[str, list[float]], cpu_speeds: dict[str, list[float]]) -> list[dict]:
    """Medians; ratios are medians of the ratios within a round."""
    rows = []
    for name, values in speeds.items():
        row = {"variant": name, "tokens_per_second": round(statistics.median(values), 1)}
        for variant, base, target in TARGETS:
            if name == variant and base in speeds:
                ratios = [a / b for a, b in zip(values, speeds[base])]
                row.update(
                    base=base,
                    ratio=round(statistics.median(ratios), 4),
                    ratio_low=round(min(ratios), 4),
                    ratio_high=round(max(ratios), 4),
                    cpu_ratio=round(
                        statistics.median(
                            a / b for a, b in zip(cpu_speeds[name], cpu_speeds[base])
                        ),
                        4,
                    ),
                    target=target,
                )
        rows.append(row)
    return rows


def show(size: str, rows: list[dict]) -> None:
    cells = []
    for r in rows:
        cell = [r["variant"], f"{r['tokens_per_second']:,.0f}"]
        if "ratio" in r:
            cell += [f"{r['ratio']:.3f}", r["base"], f">= {r['target']}"]
            cell += [f"{r['ratio_low']:.3f}-{r['ratio_high']:.3f}", f"{r['cpu_ratio']:.3f}"]
        cells.append(cell + [""] * (7 - len(cell)))
    header = ["variant", "tokens/s", "ratio", "of", "target", "rounds", "by processor time"]
    harness.show(f"LSTM language model, {size}", header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of plain,full,sx,vq")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=10, help="updates per variant and round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, help="binarised data (default: a generated corpus)")
    args = parser.parse_args()
    names = [name.strip() for name in args.variants.split(",")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        parser.error(f"--variants {args.variants}: {unknown[0]} is unknown; of plain,full,sx,vq")

    harness.quiet()
    torch.set_num_threads(args.threads)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        data = args.data
        if data is None:
            data = Path(folder)
            make_corpus(data, "train", (), 10_002, [25] * 8000)
        runs = {}
        for name in names:
            say(f"building {name}")
            with contextlib.redirect_stdout(io.StringIO()):
                runs[name] = build(name, data, args.size)
        speeds, cpu_speeds = measure(runs, args.rounds, args.updates, say)
    rows = summarise(speeds, cpu_speeds)
    show(args.size, rows)
    more = {key: getattr(args, key) for key in ("size", "threads", "rounds", "updates")}
    speeds_by_clock = {"tokens_per_second": speeds, "tokens_per_processor_second": cpu_speeds}
    harness.write("lm_recipe", rows, **more, **speeds_by_clock)


if __name__ == "__main__":
    main()
