"""fairseq-dpq-inspect --target-ratio, --target-bytes, --suggest: the K and D to take."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple

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
from fairseq_dpq.cli.common import Bars
from fairseq_dpq.cli.text import size
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

Shapes = Dict[str, Tuple[int, int]]  # rows and columns of tables, by path

_SHOWN = 5
_EMBEDDINGS = [f for f in plugin_fields() if f.name == "embeddings"]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


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
    found = re.fullmatch(r"([0-9.]+)\s*([KMG]?I?)B?", text.strip().upper())
    try:
        number = float(found.group(1)) * _UNITS[found.group(2)] if found else 0
    except (KeyError, ValueError):
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes; try 2M or 500K")
    return int(number)


def suggest(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Print the choices for one checkpoint or one command."""
    if (words and args.checkpoints) or (not words and len(args.checkpoints) != 1):
        raise CheckpointError("give one checkpoint, or one command after --")
    if args.target_ratio is not None and not args.target_ratio > 0:
        raise CheckpointError(f"--target-ratio {args.target_ratio:g}: must be above 0; try 30")
    shapes, samples = _of_command(words, args) if words else _of_checkpoint(args)
    tables = list(shapes.values())
    full = sum(4 * n * d for n, d in tables)
    choices = all_choices(tables, (True,) if args.share_subspaces else (False, True))
    scores = _scores(args.sweep) if args.sweep else {}
    ratios = RATIOS if args.target_ratio is None else [args.target_ratio]
    limits = [args.target_bytes] if args.target_bytes else [full / ratio for ratio in ratios]
    fitting = {limit: _fitting(choices, scores, limit) for limit in limits}
    if not any(fitting.values()):
        least = min(choices, key=lambda c: c.bytes)
        raise CheckpointError(
            f"no K and D reach {size(int(limits[0]))} bytes; the smallest is {size(least.bytes)} "
            f"bytes, ratio {least.ratio:.1f}, with {least.flags()}"
        )
    if samples:
        fitting = _fit(fitting, samples)
    single = len(limits) == 1
    out = []
    for limit, found in fitting.items():
        best = ranked(found, scores)[: _SHOWN if single else 1]
        lead = "" if single else f"ratio {full / limit:.0f}: "
        out += [replace(choice, reason=lead + choice.reason) for choice in best]
    facts: dict[str, Any] = {
        "source": "command" if words else str(args.checkpoints[0]),
        "tables": [
            {"path": path, "num_embeddings": n, "embedding_dim": d}
            for path, (n, d) in shapes.items()
        ],
        "full_bytes": full,
        "choices": [{**asdict(c), "bits_per_symbol": c.bits, "flags": c.flags()} for c in out],
    }
    print(json.dumps(facts, indent=2) if args.json else _text(facts, out))


def _fitting(choices: list[Choice], scores: Any, limit: float) -> list[Choice]:
    """What reaches the limit: the largest D of each K, and all that a sweep has measured."""
    found = reaching(choices, limit)
    known = [c for c in choices if (c.K, c.D, c.shared) in scores and c.bytes <= limit]
    # What leaves half of the room unused says little, unless nothing larger was measured.
    large = [c for c in known if c.bytes >= limit / 2]
    known = large or sorted(known, key=lambda c: -c.bytes)[:1]
    return list(dict.fromkeys([*found, *known]))


def _fit(fitting: dict[float, list[Choice]], samples: list[Tensor]) -> dict[float, list[Choice]]:
    """Each choice with its error, worked out once."""
    different = list(dict.fromkeys(c for found in fitting.values() for c in found))
    bars = Bars(least=1)
    known = dict(zip(different, with_errors(different, samples, bars("k-means", len(different)))))
    bars.close()
    return {limit: [known[c] for c in found] for limit, found in fitting.items()}


def _of_checkpoint(args: argparse.Namespace) -> tuple[Shapes, list[Tensor]]:
    """The full tables of a checkpoint, and rows of each."""
    checkpoint = Checkpoint.load(args.checkpoints[0], args.trust)
    if checkpoint.record() is not None:
        raise CheckpointError(
            f"{args.checkpoints[0]} has DPQ tables already; give a full checkpoint"
        )
    paths = [found.path for found in choose_tables(checkpoint, args.embeddings)]
    tables = {path: checkpoint.weights[f"{path}.weight"] for path in paths}
    shapes = {path: (table.shape[0], table.shape[1]) for path, table in tables.items()}
    return shapes, [sample(table) for table in tables.values()]


def _of_command(words: Sequence[str], args: argparse.Namespace) -> tuple[Shapes, list[Tensor]]:
    """The tables of a training command; there are no rows yet."""
    if "train" not in Path(words[0]).name:
        raise CheckpointError(f"after --, give a fairseq-train command, not {words[0]}")
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(chosen, _EMBEDDINGS, embeddings=args.embeddings)
    embeddings = chosen.parse_known_args(words[1:])[0].embeddings
    tables = tables_of_command(without(words[1:], dpq_flags()), embeddings)
    return {path: (n, d) for path, n, d in tables}, []


def _scores(folder: Path) -> dict[tuple[int, int, bool], tuple[float, str]]:
    """The best method's score at each K and D of a sweep, and its words; lower is better."""
    try:
        results = read_results(folder)
        metric = choose_metric(results, None)
    except RunsError as error:
        raise CheckpointError(f"--sweep: {error}") from error
    sign = 1 if lower_is_better(metric) else -1
    out: dict[tuple[int, int, bool], tuple[float, str]] = {}
    for r in results:
        if r.method and r.done and metric in r.scores:
            score = sign * r.scores[metric], f"{metric} {r.scores[metric]:g} with {r.method}"
            key = r.K, r.D, r.shared
            out[key] = min(score, out.get(key, score))
    return out


def _text(facts: dict[str, Any], choices: list[Choice]) -> str:
    lines = [f"{t['path']}: {t['num_embeddings']} x {t['embedding_dim']}" for t in facts["tables"]]
    lines.append(f"full: {size(facts['full_bytes'])} bytes")
    rows = [["flags", "bytes", "ratio", "bits/symbol", "error"]]
    for c in choices:
        error = "-" if c.error is None else f"{100 * c.error:.1f} %"
        rows.append([c.flags(), size(c.bytes), f"{c.ratio:.1f}", str(c.bits), error])
    table = text_table(rows).splitlines()
    reasons = ["", *(c.reason for c in choices)]
    lines += [f"{line}  {reason}".rstrip() for line, reason in zip(table, reasons)]
    return "\n".join(lines)
