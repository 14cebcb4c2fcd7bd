"""One training step of an LSTM language model, 2 x 200, 20 x 20 tokens, vocabulary 10,000:
DPQEmbedding (K = 32, D = 25, shared) against nn.Embedding; time and peak memory, one thread."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness

VOCABULARY, SIZE, BATCH, STEPS = 10_000, 200, 20, 20
OPTIONS = {"K": 32, "D": 25, "share_subspaces": True}
LIMITS = {"sx": 1.10, "vq": 1.06}
MEMORY_LIMIT = 1.02


def build(method: str | None) -> Any:
    """The model's forward and backward pass, as a function of a batch of tokens."""
    import torch
    from torch import nn

    from fairseq_dpq import DPQEmbedding, collect_regularizer

    torch.manual_seed(0)
    embedding: nn.Module
    if method is None:
        embedding = nn.Embedding(VOCABULARY, SIZE)
    else:
        embedding = DPQEmbedding(VOCABULARY, SIZE, method=method, **OPTIONS)
    lstm = nn.LSTM(SIZE, SIZE, 2)
    output = nn.Linear(SIZE, VOCABULARY)
    parameters = [p for m in (embedding, lstm, output) for p in m.parameters()]

    def step(tokens: Any, targets: Any) -> float:
        for p in parameters:
            p.grad = None
        logits = output(lstm(embedding(tokens))[0])
        loss = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
        if method is not None:
            loss = loss + collect_regularizer(embedding)
        loss.backward()
        return loss.item()

    step.extra = sum(  # type: ignore[attr-defined]
        p.numel() * 4 for name, p in embedding.named_parameters() if name in ("keys", "values")
    )
    return step


def peak_bytes(method: str | None, batches: list) -> tuple[int, int]:
    """Most bytes of tensors alive at once, from building the model to its third step, and the
    bytes of keys and values with their gradients; from the allocator's own record."""
    import torch

    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step = build(method)
        for batch in batches[:3]:
            step(*batch)
    extra = 2 * step.extra
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    alive = peak = 0
    memory = [e for e in events if e.get("name") == "[memory]"]
    for event in sorted(memory, key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak, extra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="rounds that count")
    args = parser.parse_args()
    harness.steady()

    import torch

    g = torch.Generator().manual_seed(1)
    # words as frequent as in text: Zipf's law
    zipf = 1 / torch.arange(1.0, VOCABULARY + 1)
    draw = torch.multinomial(zipf, 16 * STEPS * BATCH, replacement=True, generator=g)
    words = draw.view(16, STEPS, BATCH)
    batches = [(words[i], words[(i + 1) % 16]) for i in range(16)]
    methods: dict[str, str | None] = {"full": None, "sx": "sx", "vq": "vq"}
    steps = {name: build(method) for name, method in methods.items()}
    times = harness.interleaved(
        {
            name: lambda i, step=step: step(*batches[i % 16])  # type: ignore[misc]
            for name, step in steps.items()
        },
        args.rounds,
    )
    del steps
    memory = {name: peak_bytes(method, batches) for name, method in methods.items()}
    full_peak = memory["full"][0]
    rows, table = [], []
    for name, (peak, extra) in memory.items():
        found = harness.ratio(times, name, "full")
        beyond = (peak - extra) / full_peak
        limit = LIMITS.get(name)
        rows.append(
            {
                "embedding": name,
                "ms": statistics.median(times[name]) * 1e3,
                "ratio": found,
                "limit": limit,
                "peak_bytes": peak,
                "keys_and_values_bytes": extra,
                "memory_ratio": beyond,
                "memory_limit": MEMORY_LIMIT if limit else None,
            }
        )
        label = "nn.Embedding" if name == "full" else f"DPQEmbedding, {name}"
        table.append(
            [
                label,
                f"{statistics.median(times[name]) * 1e3:.1f}",
                f"{found:.3f}",
                harness.verdict(found, limit),
                f"{peak / 1e6:.1f}",
                f"{beyond:.3f}",
                harness.verdict(beyond, MEMORY_LIMIT if limit else None),
            ]
        )
    header = ["embedding", "ms", "ratio", "limit", "peak MB", "ratio*", "limit"]
    harness.show("LSTM language model 2 x 200, forward and backward, 20 x 20 tokens", header, table)
    print("* beyond keys and values (and their gradients)")
    harness.write("train_step", rows)


if __name__ == "__main__":
    main()
