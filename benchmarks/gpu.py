"""Lookup, logits, training step and generation on a GPU: verified against the CPU, timed, and
printed as a table to paste. PyTorch's operators first, then the Triton kernels of
FAIRSEQ_DPQ_TRITON=1.

    python benchmarks/gpu.py [--rounds N] [--device cpu: to try the program itself]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from datetime import date
from typing import Any, Callable, Iterator

import torch
from torch import Tensor, nn

from fairseq_dpq import CodesLinear, CompactEmbedding, DPQEmbedding, collect_regularizer, native
from fairseq_dpq.native import library

N, DIM, K = 32_000, 512, 32
STEPS, BEAM = 32, 5
Side = Callable[[], Any]


class Table:
    """The lines to paste: what, side, milliseconds, ratio to the first side, agreement."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.lines: list[str] = []
        self.failures = 0

    def add(self, what: str, sides: dict[str, tuple[Side, str]]) -> None:
        """Time the sides in turn; each comes with how it agrees with the CPU."""
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(-3, self.rounds):
            for name, (side, _) in sides.items():
                self.wait()
                start = time.perf_counter()
                side()
                self.wait()
                if number >= 0:
                    times[name].append(time.perf_counter() - start)
        base = statistics.median(next(iter(times.values())))
        for name, (_, verdict) in sides.items():
            taken = statistics.median(times[name])
            self.failures += "WRONG" in verdict
            self.lines.append(
                f"| {what} | {name} | {taken * 1e3:.3f} | {taken / base:.2f} | {verdict} |"
            )

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def same(found: Tensor, expected: Tensor) -> str:
    return "equal" if torch.equal(found.cpu(), expected) else "WRONG"


def close(found: Tensor, expected: Tensor, limit: float) -> str:
    """The largest difference as a share of the largest number."""
    apart = float((found.cpu().float() - expected).abs().max() / expected.abs().max())
    return f"{apart:.0e}" + ("" if apart <= limit else " WRONG")


def kernels(on: bool) -> None:
    """Turn the Triton kernels on or off; forms that are used from now on notice."""
    os.environ["FAIRSEQ_DPQ_TRITON"] = "1" if on else "0"
    library.gpu.cache_clear()


def on_device(form: CompactEmbedding, device: str) -> Iterator[tuple[str, CompactEmbedding]]:
    """The form on the device by PyTorch, then by the kernels; each is used once, and stays so."""
    for name, on in (("PyTorch", False), ("Triton", True)):
        if on and device == "cpu":
            continue
        kernels(on)
        if on and library.gpu(torch.zeros((), device=device).device) is None:
            continue
        moved = copy.deepcopy(form).to(device)
        moved(torch.zeros(1, dtype=torch.int64, device=device))
        yield f"{name}, D = {form.D}", moved
    kernels(False)


def random_form(D: int) -> CompactEmbedding:
    codes = torch.randint(K, (N, D), dtype=torch.uint8)
    return CompactEmbedding.from_codes(codes, torch.randn(D, K, DIM // D), DIM)


def lookup(table: Table, device: str) -> None:
    forms = [random_form(D) for D in (64, 128)]
    full = nn.Embedding(N, DIM).requires_grad_(False).to(device)
    for count in (1, 4096, 65536):
        ids = torch.randint(N, (count,))
        own = ids.to(device)
        sides: dict[str, tuple[Side, str]] = {"nn.Embedding": (lambda own=own: full(own), "-")}
        for form in forms:
            expected = form(ids)
            for name, moved in on_device(form, device):
                verdict = same(moved(own), expected)
                sides[name] = (lambda own=own, moved=moved: moved(own), verdict)
        table.add(f"lookup, {count:,} ids", sides)


def logits(table: Table, device: str) -> None:
    forms = [random_form(D) for D in (64, 128)]
    weight = torch.randn(N, DIM, device=device)
    for batch in (1, 64, 1024):
        h = torch.randn(batch, DIM)
        own = h.to(device)
        sides: dict[str, tuple[Side, str]] = {}
        sides["dense product"] = (lambda own=own: nn.functional.linear(own, weight), "-")
        for form in forms:
            expected = CodesLinear(form)(h[:8])
            for name, moved in on_device(form, device):
                layer = CodesLinear(moved)
                verdict = close(layer(own)[:8], expected, 1e-5)
                sides[name] = (lambda own=own, layer=layer: layer(own), verdict)
        table.add(f"logits, {batch:,} rows", sides)


class LanguageModel(nn.Module):
    """An LSTM with an embedding and a full output layer."""

    def __init__(self, method: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.output = nn.LSTM(DIM, DIM, 2), nn.Linear(DIM, N)
        self.embedding: nn.Module = nn.Embedding(N, DIM)
        if method is not None:
            self.embedding = DPQEmbedding(N, DIM, method=method, K=K, D=64)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss, with gradients."""
        self.zero_grad(set_to_none=True)
        scores = self.output(self.lstm(self.embedding(tokens))[0])
        loss = nn.functional.cross_entropy(scores.view(-1, N), targets.view(-1))
        loss = loss + collect_regularizer(self)
        loss.backward()
        return loss.detach()


def training(table: Table, device: str) -> None:
    tokens = torch.randint(N, (20, 16))
    sides: dict[str, tuple[Side, str]] = {}
    for name, method in (("nn.Embedding", None), ("DPQ-SX", "sx"), ("DPQ-VQ", "vq")):
        expected = LanguageModel(method).step(tokens, tokens.flip(0))
        model = LanguageModel(method).to(device)
        given = tokens.to(device), tokens.flip(0).to(device)
        verdict = "loss " + close(model.step(*given), expected, 1e-3)
        sides[name] = (lambda model=model, given=given: model.step(*given), verdict)
    table.add("training step, 20 x 16 tokens", sides)


class Generator(nn.Module):
    """Greedy search of a GRU with a table that is both its input and its output layer."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(DIM, DIM)
        self.table, self.output = table, CodesLinear(table)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """The tokens (STEPS, rows) that follow."""
        state, found = None, []
        for _ in range(STEPS):
            state = self.cell(self.table(tokens), state)
            tokens = self.output(state).argmax(-1)
            found.append(tokens)
        return torch.stack(found)


def generation(table: Table, device: str) -> None:
    form = random_form(64)
    dense = nn.Embedding.from_pretrained(form.weight.clone())
    start = torch.randint(N, (BEAM,))
    own = start.to(device)
    expected = Generator(form)(start)
    sides: dict[str, tuple[Side, str]] = {}
    found = [("nn.Embedding", dense.to(device)), *on_device(form, device)]
    for name, moved in found:
        model = Generator(moved).to(device)
        agree = float((model(own).cpu() == expected).float().mean())
        # A near tie may fall otherwise, and all tokens after it.
        verdict = f"{agree:.0%} of the tokens" + ("" if agree > 0.5 else " WRONG")
        sides[name] = (lambda model=model: model(own), verdict)
    table.add(f"generation, {STEPS} steps, {BEAM} rows", sides)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing measured")
        return 0
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    table = Table(args.device, args.rounds)
    with torch.no_grad():
        lookup(table, args.device)
        logits(table, args.device)
    training(table, args.device)
    generation(table, args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    triton = sys.modules.get("triton")
    versions = f"torch {torch.__version__}, triton {getattr(triton, '__version__', 'not used')}"
    print(f"{name}, {versions}, {native.describe()}, {date.today()}\n")
    print("| what | side | ms | ratio | against the CPU |\n|---|---|---:|---:|---|")
    print("\n".join(table.lines))
    if table.failures:
        print(f"\n{table.failures} results are wrong", file=sys.stderr)
    return 1 if table.failures else 0


if __name__ == "__main__":
    sys.exit(main())
