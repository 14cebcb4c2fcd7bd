"""fairseq-dpq-inspect --target-ratio, --target-bytes, --suggest: the K and D to take."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from torch import Tensor

from fairseq_dpq.choosing_sizes import (
    RATIOS,
    Choice,
    all_choices,
    ranked,
    reaching,
    sample,
    with_errors,
)
from fairseq_dpq.cli.text import print_json
from fairseq_dpq.config import add_flags
from fairseq_dpq.fairseq_plugin.building import tables_of_command
from fairseq_dpq.fairseq_plugin.options import plugin_fields
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.tables import choose_tables
from fairseq_dpq.runs.folder import RunsError
from fairseq_dpq.runs.logs import lower_is_better
from fairseq_dpq.size_report import text_table
from fairseq_dpq.sweeps.grid import dpq_flags, without
from fairseq_dpq.sweeps.results import choose_metric, read_results

# Of each table: path, rows, columns, and a sample of its rows if it has been trained
Tables = List[Tuple[str, int, int, Optional[Tensor]]]

_SHOWN = 5
_EMBEDDINGS = [f for f in plugin_fields() if f.name == "embeddings"]


def add_targets(parser: argparse.ArgumentParser) -> None:
    """The options that ask for K and D instead of a report."""
    group = parser.add_argument_group(
        "which K and D to take, for a checkpoint without DPQ or a command: -- fairseq-train ..."
    )
    one = group.add_mutually_exclusive_group()
    one.add_argument("--target-ratio", type=float, metavar="R", help="at least this ratio")
    one.add_argument("--target-bytes", type=parse_bytes, metavar="N", help="at most this: 2M, 500K")
    one.add_argument("--suggest", action="store_true", help="the best K and D of several ratios")
    group.add_argument("--sweep", type=Path, metavar="DIR", help="rank by what this sweep measured")
    add_flags(group, _EMBEDDINGS)


def wanted(args: argparse.Namespace, words: Sequence[str]) -> bool:
    """Whether the command line asks for K and D."""
    return bool(words or args.suggest or args.target_ratio is not None or args.target_bytes)


def parse_bytes(text: str) -> int:
    """2M is 2,000,000 bytes, 2Mi is 2,097,152."""
    found = re.fullmatch(r"(\d*\.?\d+)\s*([KMG]?)(I?)B?", text.strip().upper())
    unit = (1024 if found[3] else 1000) ** " KMG".index(found[2] or " ") if found else 0
    number = int(float(found[1]) * unit) if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes; try 2M or 500K")
    return number


def suggest(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Print the choices for one checkpoint or one command."""
    if (words and args.checkpoints) or (not words and len(args.checkpoints) != 1):
        raise CheckpointError("give one checkpoint, or one command after --")
    if args.target_ratio is not None and not args.target_ratio > 0:
        raise CheckpointError(f"--target-ratio {args.target_ratio:g}: must be above 0; try 30")
    tables = _of_command(words, args) if words else _of_checkpoint(args)
    shapes = [(n, d) for _, n, d, _ in tables]
    full = sum(4 * n * d for n, d in shapes)
    choices = all_choices(shapes, (True,) if args.share_subspaces else (False, True))
    choices = _measured(choices, args.sweep) if args.sweep else choices
    ratios = RATIOS if args.target_ratio is None else [args.target_ratio]
    limits = [args.target_bytes] if args.target_bytes else [full / ratio for ratio in ratios]
    fitting = {limit: reaching(choices, limit) for limit in limits}
    if not any(fitting.values()):
        least = min(choices, key=lambda c: c.bytes)
        raise CheckpointError(
            f"no K and D reach {int(limits[0]):,} bytes; the smallest is {least.bytes:,} bytes, "
            f"ratio {least.ratio:.1f}, with {least.flags()}"
        )
    samples = [rows for *_, rows in tables if rows is not None]
    if samples:
        known = with_errors((c for found in fitting.values() for c in found), samples)
        fitting = {limit: [known[c] for c in found] for limit, found in fitting.items()}
    single = len(limits) == 1
    out = []
    for limit, found in fitting.items():
        lead = "" if single else f"ratio {full / limit:.0f}: "
        for choice in ranked(found)[: _SHOWN if single else 1]:
            out.append(replace(choice, reason=lead + choice.reason))
    facts: dict[str, Any] = {
        "source": "command" if words else str(args.checkpoints[0]),
        "tables": [
            {"path": path, "num_embeddings": n, "embedding_dim": d} for path, n, d, _ in tables
        ],
        "full_bytes": full,
        "choices": [{**asdict(c), "bits_per_symbol": c.bits, "flags": c.flags()} for c in out],
    }
    if args.json:
        return print_json(facts)
    print(*(f"{path}: {n} x {d}" for path, n, d, _ in tables), f"full: {full:,} bytes", sep="\n")
    print(_text(out))


def _of_checkpoint(args: argparse.Namespace) -> Tables:
    """The full tables of a checkpoint, and rows of each."""
    checkpoint = Checkpoint.load(args.checkpoints[0], args.trust)
    if checkpoint.record is not None:
        raise CheckpointError(f"{checkpoint.path} has DPQ tables already; give a full checkpoint")
    paths = [found.path for found in choose_tables(checkpoint, args.embeddings)]
    found = {path: checkpoint.weights[f"{path}.weight"] for path in paths}
    return [(path, len(rows), rows.shape[1], sample(rows)) for path, rows in found.items()]


def _of_command(words: Sequence[str], args: argparse.Namespace) -> Tables:
    """The tables of a training command; there are no rows yet."""
    if "train" not in Path(words[0]).name:
        raise CheckpointError(f"after --, give a fairseq-train command, not {words[0]}")
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(chosen, _EMBEDDINGS, embeddings=args.embeddings)
    embeddings = chosen.parse_known_args(words[1:])[0].embeddings
    tables = tables_of_command(without(words[1:], dpq_flags()), embeddings)
    return [(path, n, d, None) for path, n, d in tables]


def _measured(choices: Sequence[Choice], folder: Path) -> list[Choice]:
    """The choices with the best method's score at each K and D of a sweep."""
    try:
        results = read_results(folder)
        metric = choose_metric(results, None)
    except RunsError as error:
        raise CheckpointError(f"--sweep: {error}") from error
    sign = 1 if lower_is_better(metric) else -1
    best: dict[tuple[int, int, bool], tuple[float, str]] = {}
    for r in results:
        if r.method and r.done and metric in r.scores:
            score = sign * r.scores[metric], f"{metric} {r.scores[metric]:g} with {r.method}"
            key = r.K, r.D, r.shared
            best[key] = min(score, best.get(key, score))
    scores = [best.get((c.K, c.D, c.shared), (None, None)) for c in choices]
    return [replace(c, measured=x, score=text) for c, (x, text) in zip(choices, scores)]


def _text(choices: list[Choice]) -> str:
    rows = [["flags", "bytes", "ratio", "bits/symbol", "error"]]
    for c in choices:
        error = "-" if c.error is None else f"{100 * c.error:.1f} %"
        rows.append([c.flags(), f"{c.bytes:,}", f"{c.ratio:.1f}", str(c.bits), error])
    lines = zip(text_table(rows).splitlines(), ["", *(c.reason for c in choices)])
    return "\n".join(f"{line}  {reason}".rstrip() for line, reason in lines)
