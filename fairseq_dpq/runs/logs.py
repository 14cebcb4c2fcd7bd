"""What fairseq logs of a training: numbers in either format, progress, validations, curves, which
TensorBoard's files have too."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

from fairseq_dpq.files.errors import CheckpointError

Points = List[Tuple[int, float]]
Curves = Dict[str, Points]  # "train loss", "valid ppl", ...: (update, value)
METRICS = ("loss", "ppl", "dpq_changed", "dpq_entropy", "dpq_used", "dpq_regularizer", "bleu")

ATTEMPT = "# fairseq-dpq: attempt"
_LINE = re.compile(r"\| (train_inner|train|valid\w*) \| (.*)$")
_MAX_LINE = 100_000  # a longer one is not a line of numbers
_PAIR = re.compile(r"(\w+)=([-+.\w]+)")
_LENGTH = re.compile(r"'(max_update|max_epoch)': (\d+)")
# What a validation says of its place, its speed, its size and the codes: no scores.
_NOT_SCORES = re.compile(r"(epoch|num_updates|wps|wpb|bsz|ups|best_.*|dpq_.*)$")
_LOWER_IS_BETTER = re.compile(r"(loss|ppl|wer|uer|ter|cer)$")


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of a metric is the better one."""
    return _LOWER_IS_BETTER.search(metric) is not None


def numbers_of(line: str) -> tuple[str, dict[str, float]]:
    """The section of a line (train_inner, train, valid, ...) and its finite numbers: a JSON object,
    `epoch 001 | loss 7.1 | ...` or `... loss=7.1, ...`. Empty for any other line."""
    found = _LINE.search(line) if len(line) < _MAX_LINE else None
    if found is None:
        return "", {}
    section, text = found.groups()
    if text.startswith("{"):
        try:
            pairs = json.loads(text)
        except (ValueError, RecursionError):
            pairs = {}
    else:
        parts = [part.split() for part in text.split("|")]
        pairs = {**dict(part for part in parts if len(part) == 2), **dict(_PAIR.findall(text))}
    out = {}
    for key, value in pairs.items():
        try:  # fairseq writes numbers as texts
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            out[key.replace(f"{section}_", "", 1)] = number
    return section, out


@dataclass
class RunLog:
    """The log of one run, read as it grows."""

    path: Path
    attempts: int = 0
    max_update: int = 0
    max_epoch: int = 0
    updates: int = 0
    epochs: float = 0.0  # how far the data was read
    finished: bool = False
    loss: float | None = None  # the last one of the training
    gpu_gb_free: float | None = None
    valid: dict[int, dict[str, float]] = field(default_factory=dict)  # by number of updates
    last_line: str = ""  # that says something: of a failed run, its error
    _offset: int = 0

    def read(self) -> RunLog:
        """Take in what has been written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return self
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        for line in text[:whole].decode("utf-8", "replace").splitlines():
            self._take(line)
        self.last_line = text[whole:].decode("utf-8", "replace").strip() or self.last_line
        return self

    def _take(self, line: str) -> None:
        if line.startswith(ATTEMPT):
            self.attempts += 1
            self.finished, self.last_line = False, ""
            return
        self.last_line = line.strip() or self.last_line
        if "| done training in" in line:
            self.finished = True
        elif not self.max_update and not self.max_epoch and "'max_update': " in line:
            lengths = dict(_LENGTH.findall(line))
            self.max_update = int(lengths.get("max_update", 0))
            self.max_epoch = int(lengths.get("max_epoch", 0))
        section, numbers = numbers_of(line)
        updates = int(numbers.get("num_updates", 0))
        if section == "valid":
            self.updates = max(self.updates, updates)
            scores = {name: v for name, v in numbers.items() if not _NOT_SCORES.match(name)}
            self.valid[updates] = scores
        elif section == "train_inner":
            self.updates, self.epochs = updates, numbers.get("update", 0.0)
            self.loss = numbers.get("loss")
            free = numbers.get("gb_free")
            if free is not None:
                self.gpu_gb_free = min(free, self.gpu_gb_free or free)

    def progress(self) -> float:
        """The share of the training that is done, from 0 to 1."""
        updates = self.updates / self.max_update if self.max_update else 0.0
        epochs = self.epochs / self.max_epoch if self.max_epoch else 0.0
        return 1.0 if self.finished else min(max(updates, epochs), 1.0)

    def best(self, after: int = 0) -> dict[str, float]:
        """The best value of each metric, of the validations after so many updates."""
        out: dict[str, float] = {}
        for values in [values for updates, values in self.valid.items() if updates > after]:
            for name, value in values.items():
                pick = min if lower_is_better(name) else max
                out[name] = pick(value, out.get(name, value))
        return out


def read_curves(path: Path) -> Curves:
    """The curves of a log file or of a TensorBoard folder."""
    curves: dict[str, dict[int, float]] = {}
    try:
        for section, name, update, value in (_tensorboard if path.is_dir() else _log)(path):
            side = "train" if section.startswith("train") else "valid"
            # A resumed training repeats some updates: the last of each counts.
            curves.setdefault(f"{side} {name}", {})[update] = value
    except OSError as error:
        raise CheckpointError(f"cannot read --log {path}: {error.strerror or error}") from error
    if not curves:
        kind = "TensorBoard file" if path.is_dir() else "line of fairseq's training log"
        raise CheckpointError(f"--log {path} has no {kind} with loss or perplexity")
    return {name: sorted(points.items()) for name, points in sorted(curves.items())}


def _log(path: Path) -> Iterator[tuple[str, str, int, float]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for section, numbers in map(numbers_of, file):
            for name in METRICS if "num_updates" in numbers else ():
                # The epoch's mean is not a point of the curve that each interval's line draws.
                if name in numbers and not (section == "train" and name in ("loss", "ppl")):
                    yield section, name, int(numbers["num_updates"]), numbers[name]


def _tensorboard(folder: Path) -> Iterator[tuple[str, str, int, float]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise CheckpointError(
            f"--log {folder}: TensorBoard files need its own reader: pip install tensorboard"
        ) from error
    for part in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        split = part.name if part != folder else "train_inner"
        if split == "train" and (part.parent / "train_inner").is_dir():
            continue
        events = EventAccumulator(str(part), size_guidance={"scalars": 0})
        events.Reload()
        for tag in set(events.Tags()["scalars"]) & set(METRICS):
            for event in events.Scalars(tag):
                if math.isfinite(event.value):
                    yield split, tag, event.step, event.value
