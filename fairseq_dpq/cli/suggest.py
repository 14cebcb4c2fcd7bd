"""fairseq-dpq-inspect --target-ratio, --target-bytes, --suggest: the K and D to take.

What each pair stores, which of them reach a size, and which of those keep most of a trained table.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from fairseq_dpq.cli.text import print_json
from fairseq_dpq.config import add_flags, flag
from fairseq_dpq.fairseq_plugin.building import tables_of_command
from fairseq_dpq.fairseq_plugin.options import plugin_fields
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.progress import bar
from fairseq_dpq.files.tables import choose_tables
from fairseq_dpq.forms.packing import code_bits
from fairseq_dpq.forms.quantization import fit_error
from fairseq_dpq.runs.folder import RunsError
from fairseq_dpq.runs.logs import lower_is_better
from fairseq_dpq.size_report import text_table
from fairseq_dpq.sizes import compact_bytes
from fairseq_dpq.sweeps.grid import dpq_flags, without
from fairseq_dpq.sweeps.results import choose_metric, read_results

RATIOS = (10, 20, 50, 100, 200)  # where no target is given
ROWS = 8192  # sampled of a table
_FEWEST = 8  # rows for each code, or k-means only repeats the rows
_LARGEST_K = 512
_CLOSE = 1.1  # errors that differ by less than this factor are the same
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


def wanted(args: argparse.Namespace) -> bool:
    """Whether the command line asks for K and D."""
    return bool(args.command or args.suggest or args.target_ratio is not None or args.target_bytes)


def parse_bytes(text: str) -> int:
    """2M is 2,000,000 bytes, 2Mi is 2,097,152."""
    found = re.fullmatch(r"(\d*\.?\d+)\s*([KMG]?)(I?)B?", text.strip().upper())
    unit = (1024 if found[3] else 1000) ** " KMG".index(found[2] or " ") if found else 0
    number = int(float(found[1]) * unit) if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes; try 2M or 500K")
    return number


def suggest(args: argparse.Namespace) -> None:
    """Print the choices for one checkpoint or one command."""
    words = args.command
    if (words and args.checkpoints) or (not words and len(args.checkpoints) != 1):
        raise CheckpointError("give one checkpoint, or one command after --")
    if args.target_ratio is not None and not args.target_ratio > 1:
        raise CheckpointError(f"--target-ratio {args.target_ratio:g}: must be above 1; try 30")
    tables = _of_command(args) if words else _of_checkpoint(args)
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


def _of_command(args: argparse.Namespace) -> Tables:
    """The tables of a training command; there are no rows yet."""
    program, *words = args.command
    if "train" not in Path(program).name:
        raise CheckpointError(f"after --, give a fairseq-train command, not {program}")
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(chosen, _EMBEDDINGS, embeddings=args.embeddings)
    embeddings = chosen.parse_known_args(words)[0].embeddings
    tables = tables_of_command(without(words, dpq_flags()), embeddings)
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


# Choices ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One K and D, what it stores, and what is known of its quality."""

    K: int
    D: int
    shared: bool
    bytes: int
    ratio: float
    error: float | None = None  # squared, as a share of the sampled rows' squared norm
    measured: float | None = None  # the score in a sweep; lower is better
    score: str | None = None  # the same in words
    reason: str = ""

    @property
    def bits(self) -> int:
        """Bits of a symbol."""
        return self.D * code_bits(self.K)

    def flags(self) -> str:
        """To paste into a command."""
        words = f"{flag('K')} {self.K} {flag('D')} {self.D}"
        return f"{words} {flag('share_subspaces')}" if self.shared else words


def all_choices(
    tables: Sequence[tuple[int, int]], sharing: Sequence[bool] = (False, True)
) -> list[Choice]:
    """Every K (a power of two) and D (a divisor of every embedding size) for some tables (n, d)."""
    full = sum(4 * n * d for n, d in tables)
    common = reduce(math.gcd, (d for _, d in tables))
    most = max(2, min(_LARGEST_K, min(n for n, _ in tables) // _FEWEST))
    out = []
    for K in (2**i for i in range(1, most.bit_length())):
        for D in (x for x in range(1, common + 1) if common % x == 0):
            for shared in sharing:
                small = sum(compact_bytes(n, d, K, D, shared) for n, d in tables)
                out.append(Choice(K, D, shared, small, full / small))
    return out


def reaching(choices: Sequence[Choice], most_bytes: float) -> list[Choice]:
    """What fits: of each K, with and without sharing, the largest D, and what a sweep measured."""
    fits = [choice for choice in choices if choice.bytes <= most_bytes]
    largest = {(c.K, c.shared): c for c in sorted(fits, key=lambda c: c.D)}
    known = sorted((c for c in fits if c.measured is not None), key=lambda c: -c.bytes)
    # What leaves half of the room unused says little, unless nothing larger was measured.
    known = [c for c in known if c.bytes >= most_bytes / 2] or known[:1]
    return list(dict.fromkeys([*largest.values(), *known]))


def sample(table: Tensor, seed: int = 0) -> Tensor:
    """Some rows of a table in float32; rows of zeros, such as padding, are left out."""
    real = table[table.abs().amax(1) > 0] if len(table) else table
    if len(real) > ROWS:
        keep = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed))[:ROWS]
        real = real[keep]
    return real.float()


def with_errors(choices: Iterable[Choice], samples: Sequence[Tensor]) -> dict[Choice, Choice]:
    """Each choice with its error over all sampled tables."""
    norms = [float(rows.double().pow(2).sum()) for rows in samples]
    out = {c: c for c in choices}
    with bar("k-means", len(out), 1) as done:
        for c in out:
            errors = (fit_error(rows, c.K, c.D, c.shared) for rows in samples)
            lost = sum(error * norm for error, norm in zip(errors, norms))
            out[c] = replace(c, error=lost / max(sum(norms), 1e-300))
            done.update(1)
    return out


def ranked(choices: Sequence[Choice]) -> list[Choice]:
    """The best first: what a sweep measured, by its score; then by error, in steps of a tenth above
    the smallest, or, where there is no table yet, by bits of a symbol in the same way; then small
    K, which learns better than its error says and costs less (figures 3 and 4 of the paper)."""
    least = max(min((c.error for c in choices if c.error is not None), default=0.0), 1e-9)
    most = max((c.bits for c in choices), default=1)

    def key(c: Choice) -> tuple[float, ...]:
        above = most / c.bits if c.error is None else max(c.error, least) / least
        step = int(math.log(above) / math.log(_CLOSE))
        return c.measured is None, c.measured or 0.0, step, c.K, c.shared, -c.D

    best = sorted(choices, key=key)
    return [replace(c, reason=_reason(c, c is best[0], least)) for c in best]


def _reason(c: Choice, first: bool, least: float) -> str:
    """One line: why it is where it is."""
    if c.score is not None:
        return f"{'best' if first else 'measured'} in the sweep: {c.score}"
    bits = code_bits(c.K)
    codes = f"{c.D} codes of {bits} bit{'s' if bits > 1 else ''}"
    if c.error is None:
        return f"{codes}: small K and large D learn best and cost least" if first else codes
    times = c.error / least
    if times < 1.005:
        return f"{codes}: the smallest error of k-means"
    small = "small K, " if first else ""
    return f"{codes}: {small}{100 * (times - 1):.0f} % more error than the smallest"
