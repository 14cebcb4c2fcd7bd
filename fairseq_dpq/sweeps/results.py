"""The result of each run, as one JSON line, and the sizes that its checkpoint shows."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Iterable, Sequence

from fairseq_dpq.checkpoints.checkpoint import Checkpoint
from fairseq_dpq.choosing_sizes import compact_bytes
from fairseq_dpq.sweeps.errors import SweepError
from fairseq_dpq.sweeps.grid import Point
from fairseq_dpq.sweeps.logs import lower_is_better

RESULT = "result.json"
LINES = "results.jsonl"


@dataclass
class Result:
    """One run. `bytes` and `ratio` are of the tables that DPQ replaces, in the compact file."""

    name: str
    method: str | None = None
    K: int = 0
    D: int = 0
    shared: bool = False
    status: str = "done"  # or failed
    scores: dict[str, float] = field(default_factory=dict)  # the best of each metric
    updates: int = 0
    attempts: int = 1
    seconds: float | None = None  # of the last attempt
    cpu_seconds: float | None = None
    peak_bytes: int | None = None
    gpu_gb_free: float | None = None
    full_bytes: int | None = None
    bytes: int | None = None
    ratio: float | None = None
    formula_ratio: float | None = None
    error: str = ""
    command: str = ""

    @property
    def point(self) -> Point:
        return Point(self.method, self.K, self.D, self.shared)

    @property
    def done(self) -> bool:
        return self.status == "done"

    def seconds_per_update(self) -> float | None:
        """The cost of an update: wall time on a GPU, CPU time elsewhere, where other programs take
        their share of the clock. Not known of a run that was resumed."""
        spent = self.seconds if self.gpu_gb_free is not None else self.cpu_seconds
        if not self.done or not self.updates or self.attempts > 1 or spent is None:
            return None
        return spent / self.updates

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read a line; entries of a newer version are left out."""
        raw = json.loads(text)
        names = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in names})


def measure(checkpoints: Path) -> tuple[dict[str, Any], int]:
    """The sizes of a run's tables, and the updates of its warm-up, from its checkpoint."""
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        if (checkpoints / name).is_file():
            record = Checkpoint.load(checkpoints / name).record()
            break
    else:
        return {}, 0
    if record is None:
        return {}, 0
    full = bits = small = warmup = 0
    for table in record.tables.values():
        n, d, c = table.num_embeddings, table.embedding_dim, table.config
        assert c.D is not None  # a record has it
        full += 4 * n * d
        bits += c.compact_bits(n, d)
        small += compact_bytes(n, d, c.K, c.D, c.share_subspaces)
        warmup = max(warmup, c.warmup_updates or 0)
    sizes = {"full_bytes": full, "bytes": small}
    return {**sizes, "ratio": full / small, "formula_ratio": 8 * full / bits}, warmup


def with_full_sizes(results: Iterable[Result]) -> list[Result]:
    """The full table takes what the others replace."""
    out = list(results)
    known = next((r.full_bytes for r in out if r.full_bytes), None)
    for result in out:
        if result.method is None and known is not None:
            result.full_bytes = result.bytes = known
            result.ratio = result.formula_ratio = 1.0
    return out


def read_results(out: Path) -> list[Result]:
    """All results of a sweep's folder."""
    path = out / LINES
    if not path.is_file():
        raise SweepError(f"{out} has no {LINES}: it is not the --out of a sweep")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return with_full_sizes(Result.from_json(line) for line in lines if line)
    except (ValueError, TypeError, AttributeError) as error:
        raise SweepError(f"{path} is damaged: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def choose_metric(results: Sequence[Result], wanted: str | None) -> str:
    """The metric to compare by: the one asked for, else perplexity, else loss."""
    known: dict[str, None] = {}
    for result in results:
        known.update(dict.fromkeys(result.scores))
    if wanted is None:
        return next((name for name in ("ppl", "loss") if name in known), next(iter(known), "loss"))
    if known and wanted not in known:
        raise SweepError(
            f"--metric {wanted}: the runs have {', '.join(sorted(known))}; a BLEU score needs "
            "--eval-bleu in the command"
        )
    return wanted


def front(results: Sequence[Result], metric: str) -> list[Result]:
    """The runs that no other one beats in both bytes and score, from small to large."""
    able = [r for r in results if r.done and r.bytes and r.method and metric in r.scores]
    sign = 1 if lower_is_better(metric) else -1
    out: list[Result] = []
    for result in sorted(able, key=lambda r: (r.bytes or 0, sign * r.scores[metric])):
        if not out or sign * result.scores[metric] < sign * out[-1].scores[metric]:
            out.append(result)
    return out
