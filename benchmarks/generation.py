"""fairseq-generate with a compact tied model against the same model with a full table: tokens per
second at batch 1, beam 5, hypotheses, and peak memory.

    python benchmarks/generation.py [--rounds N] [--skip-memory]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
from fairseq_loop import make_corpus, patched_argv, user_dir

WORDS, DIM, LENGTH, STEPS = 32_000, 512, 20, 30
SIDES = ("full", "exact", "codes")
SPEED = {"exact": 1.0, "codes": 1.6}  # tokens per second against the full model's, at least
COMPACT = ["--dpq-K", "32", "--dpq-D", "64", "--dpq-embeddings", "all"]
MODEL = ["--arch", "transformer_iwslt_de_en", "--share-all-embeddings"]
# Every hypothesis has STEPS tokens: no side can save time by ending early.
SEARCH = ["--beam", "5", "--batch-size", "1", "--max-len-a", "0", "--max-len-b", str(STEPS)]
SEARCH += ["--min-len", str(STEPS), "--cpu", "--num-workers", "0"]


def make_models(folder: Path) -> None:
    """compact.pt, of a DPQ model that has not been trained, and full.pt with the same rows."""
    from fairseq import checkpoint_utils

    from fairseq_dpq.cli import compact

    for name, flags in (("dpq", COMPACT), ("full", [])):
        save_model(folder, name, flags)
    with contextlib.redirect_stdout(io.StringIO()):
        if compact.main([str(folder / "dpq.pt"), str(folder / "compact.pt")]):
            sys.exit("fairseq-dpq-compact failed")
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "compact.pt")], {"data": str(folder)}
    )
    table = model.decoder.embed_tokens.dense()
    full = torch.load(folder / "full.pt", weights_only=False)
    kept = model.state_dict()
    full["model"] = {key: kept.get(key, table).clone() for key in full["model"]}
    torch.save(full, folder / "full.pt")


def save_model(folder: Path, name: str, flags: list[str]) -> None:
    """NAME.pt, a checkpoint of a model as it is built."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    argv = [str(folder), "--user-dir", user_dir(), *MODEL, *flags, "--max-tokens", "100"]
    with patched_argv(["fairseq-train", *argv]):
        parser = options.get_training_parser()
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 1, "best_loss": 0, "criterion_name": ""}],
        "extra_state": {},
    }
    torch.save(state, folder / f"{name}.pt")


class Side:
    """A model as fairseq-generate holds it."""

    def __init__(self, folder: Path, name: str) -> None:
        from fairseq import checkpoint_utils, options
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        file = folder / ("full.pt" if name == "full" else "compact.pt")
        argv = [str(folder), "--user-dir", user_dir(), "--path", str(file), *SEARCH]
        with patched_argv(["fairseq-generate", *argv]):
            parsed = options.parse_args_and_arch(options.get_generation_parser(), argv)
        cfg = convert_namespace_to_omegaconf(parsed)
        (self.model,), _, self.task = checkpoint_utils.load_model_ensemble_and_task(
            [str(file)], {"data": str(folder), "dpq_exact_logits": name == "exact"}
        )
        self.task.load_dataset("test")
        self.model.prepare_for_inference_(cfg)
        self.generator = self.task.build_generator([self.model], cfg.generation)
        data = self.task.dataset("test")
        self.samples = [data.collater([data[i]]) for i in range(len(data))]

    def translate(self, number: int) -> Any:
        sample = self.samples[number % len(self.samples)]
        return self.task.inference_step(self.generator, [self.model], sample)


def speeds(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Tokens per CPU second of each side, in turn over the same sentences."""
    sides = {name: Side(folder, name) for name in SIDES}
    times = harness.interleaved({name: s.translate for name, s in sides.items()}, rounds, 1)
    rows = []
    expected = [sides["full"].translate(i)[0] for i in range(4)]
    for name, side in sides.items():
        found = [side.translate(i)[0] for i in range(4)]
        pairs = [(a, b) for x, y in zip(found, expected) for a, b in zip(x, y)]
        same = sum(a["tokens"].equal(b["tokens"]) for a, b in pairs) / len(pairs)
        apart = max(abs(float(a["score"] - b["score"])) for a, b in pairs)
        seconds = statistics.median(times[name])
        speed = statistics.median(f / s for f, s in zip(times["full"], times[name]))
        row = {"side": name, "tokens_per_second": (STEPS + 1) / seconds, "speed": speed}
        rows.append({**row, "same_hypotheses": same, "largest_difference": apart})
    return rows


def peak(folder: Path, name: str) -> int:
    """Peak memory of fairseq-generate in bytes."""
    file = folder / ("full.pt" if name == "full" else "compact.pt")
    argv = [str(folder), "--user-dir", user_dir(), "--path", str(file), *SEARCH, "--quiet"]
    code = "from fairseq_cli.generate import cli_main; cli_main()"
    argv += ["--model-overrides", str({"dpq_exact_logits": name == "exact"})]
    return harness.peak_memory(code, argv)[1]


def _held(row: dict[str, Any]) -> str:
    limit = SPEED.get(row["side"])
    return "-" if limit is None else harness.verdict(1 / row["speed"], 1 / limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lines", type=int, default=4, help="sentences of the test set")
    parser.add_argument("--skip-memory", action="store_true", help="speed alone")
    args = parser.parse_args()
    harness.steady()
    harness.quiet()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder, "test", ("de", "en"), WORDS, [LENGTH] * args.lines)
        make_models(folder)
        rows = speeds(folder, args.rounds)
        for row in rows if not args.skip_memory else []:
            row["peak_bytes"] = peak(folder, row["side"])
    cells = []
    for row in rows:
        held = _held(row)
        memory = f"{row['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in row else "-"
        figures = [f"{row['tokens_per_second']:.1f}", f"{row['speed']:.2f}", held, memory]
        agreement = [f"{row['same_hypotheses']:.2f}", f"{row['largest_difference']:.1e}"]
        cells.append([row["side"], *figures, *agreement])
    header = ["", "tokens/s", "speed", "limit", "peak MB", "same hypotheses", "scores apart"]
    table = 4 * WORDS * DIM / 1e6
    title = f"Batch 1, beam 5, n = {WORDS:,}, d = {DIM}: a table of {table:.0f} MB"
    harness.show(title, header, cells)
    harness.write("generation", rows)


if __name__ == "__main__":
    main()
