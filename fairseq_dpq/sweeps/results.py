"""The result of each run, as one JSON line, and the sizes that its checkpoint shows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Iterable, Sequence

from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.runs.folder import RunsError
from fairseq_dpq.runs.logs import RunLog, lower_is_better
from fairseq_dpq.runs.runner import Facts, Job
from fairseq_dpq.sizes import compact_bytes
from fairseq_dpq.sweeps.grid import CHECKPOINTS, Point

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
    def done(self) -> bool:
        return self.status == "done"

    def seconds_per_update(self) -> float | None:
        """The cost of an update: wall time on a GPU, CPU time elsewhere, where other programs take
        their share of the clock. Not known of a run that was resumed."""
        spent = self.seconds if self.gpu_gb_free is not None else self.cpu_seconds
        if not self.done or not self.updates or self.attempts > 1 or spent is None:
            return None
        return spent / self.updates

    @classmethod
    def from_facts(cls, raw: Any) -> Result:
        """Read a line or a result.json; entries of a newer version are left out."""
        result = cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw})
        for f in fields(cls):
            kind, *more = str(f.type).replace("[", " ").split()
            value = getattr(result, f.name)
            if not isinstance(value, _KINDS[kind]) and not (value is None and "None" in more):
                raise ValueError(f"{f.name} is {value!r}")
        if not all(isinstance(score, (int, float)) for score in result.scores.values()):
            raise ValueError(f"scores are {result.scores!r}")
        return result


_KINDS: dict[str, Any] = {"str": str, "int": int, "bool": bool, "float": (int, float), "dict": dict}


def finish(point: Point, job: Job, steps: list[Facts]) -> Facts:
    """What result.json holds of a training that has ended."""
    log = RunLog(job.folder / "train.log").read()
    if not log.valid:
        raise RunsError("it ended without a validation")
    sizes, warmup = measure(job.folder / CHECKPOINTS)
    return {
        **asdict(point),
        **steps[0],  # command, attempts, time and memory
        **sizes,
        # During the warm-up a validation is one of a full table.
        "scores": log.best(after=warmup),
        "updates": log.updates,
        "gpu_gb_free": log.gpu_gb_free,
    }


def measure(checkpoints: Path) -> tuple[dict[str, Any], int]:
    """The sizes of a run's tables, and the updates of its warm-up, from its checkpoint."""
    files = [checkpoints / f"checkpoint_{name}.pt" for name in ("best", "last")]
    path = next((file for file in files if file.is_file()), None)
    record = None if path is None else Checkpoint.load(path).record
    if record is None:
        return {}, 0
    full = bits = small = warmup = 0
    for table in record.tables.values():
        n, d, c = table.num_embeddings, table.embedding_dim, table.options
        full += 4 * n * d
        bits += table.config.compact_bits(n, d)
        small += compact_bytes(n, d, c["K"], c["D"], c.get("share_subspaces", False))
        warmup = max(warmup, c.get("warmup_updates") or 0)
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
        raise RunsError(f"{out} has no {LINES}: it is not the --out of a sweep")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return with_full_sizes(Result.from_facts(json.loads(line)) for line in lines if line)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise RunsError(f"{path} is damaged: {error}") from error


def choose_metric(results: Sequence[Result], wanted: str | None) -> str:
    """The metric to compare by: the one asked for, else perplexity, else loss."""
    known = list(dict.fromkeys(name for result in results for name in result.scores))
    if wanted is None:
        return next((name for name in ("ppl", "loss") if name in known), next(iter(known), "loss"))
    if known and wanted not in known:
        raise RunsError(
            f"--metric {wanted}: the runs have {', '.join(sorted(known))}; a BLEU score needs "
            "--eval-bleu in the command"
        )
    return wanted


def compared(results: Sequence[Result], metric: str) -> list[Result]:
    """The runs with codes whose bytes and score are known."""
    return [r for r in results if r.done and r.bytes and r.method and metric in r.scores]


def front(results: Sequence[Result], metric: str) -> list[Result]:
    """The runs that no other one beats in both bytes and score, from small to large."""
    able = compared(results, metric)
    sign = 1 if lower_is_better(metric) else -1
    out: list[Result] = []
    for result in sorted(able, key=lambda r: (r.bytes or 0, sign * r.scores[metric])):
        if not out or sign * result.scores[metric] < sign * out[-1].scores[metric]:
            out.append(result)
    return out
