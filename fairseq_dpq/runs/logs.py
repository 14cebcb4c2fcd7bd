"""What fairseq writes with --log-format json: progress, validations, the end of a training."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ATTEMPT = "# fairseq-dpq: attempt"
_ENTRY = re.compile(r"\| (train_inner|train|valid) \| (\{.*\})\s*$")
_LENGTH = re.compile(r"'(max_update|max_epoch)': (\d+)")
# What a validation says of its speed, its size and the codes: no scores.
_NOT_SCORES = re.compile(r"(wps|wpb|bsz|ups|best_.*|dpq_.*)$")
_LOWER_IS_BETTER = re.compile(r"(loss|ppl|wer|uer|ter|cer)$")


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of a metric is the better one."""
    return _LOWER_IS_BETTER.search(metric) is not None


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
    _offset: int = 0

    def read(self) -> None:
        """Take in what has been written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        for line in text[:whole].decode("utf-8", "replace").splitlines():
            self._take(line)

    def _take(self, line: str) -> None:
        if line.startswith(ATTEMPT):
            self.attempts += 1
            self.finished = False
            return
        if "| done training in" in line:
            self.finished = True
            return
        if not self.max_update and not self.max_epoch and "'max_update': " in line:
            lengths = dict(_LENGTH.findall(line))
            self.max_update = int(lengths.get("max_update", 0))
            self.max_epoch = int(lengths.get("max_epoch", 0))
        match = _ENTRY.search(line)
        if match is None:
            return
        try:
            entry = json.loads(match.group(2))
        except (ValueError, RecursionError):
            return
        if match.group(1) == "valid":
            self._validation(entry)
        elif match.group(1) == "train_inner":
            self.updates = int(_number(entry.get("num_updates")) or 0)
            self.epochs = _number(entry.get("update")) or 0.0
            self.loss = _number(entry.get("loss"))
            free = _number(entry.get("gb_free"))
            if free is not None:
                self.gpu_gb_free = min(free, self.gpu_gb_free or free)

    def _validation(self, entry: dict[str, Any]) -> None:
        updates = int(_number(entry.get("valid_num_updates")) or 0)
        self.updates = max(self.updates, updates)
        scores = {}
        for key, value in entry.items():
            section, _, name = key.partition("_")
            number = _number(value)
            if section == "valid" and number is not None and math.isfinite(number):
                scores[name] = number
        scores = {name: v for name, v in scores.items() if not _NOT_SCORES.match(name)}
        scores.pop("num_updates", None)
        self.valid[updates] = scores

    def progress(self) -> float:
        """The share of the training that is done, from 0 to 1."""
        shares = [0.0]
        if self.max_update:
            shares.append(self.updates / self.max_update)
        if self.max_epoch:
            shares.append(self.epochs / self.max_epoch)
        return 1.0 if self.finished else min(max(shares), 1.0)

    def best(self, after: int = 0) -> dict[str, float]:
        """The best value of each metric, of the validations after so many updates."""
        out: dict[str, float] = {}
        for updates, values in self.valid.items():
            if updates <= after:
                continue
            for name, value in values.items():
                pick = min if lower_is_better(name) else max
                out[name] = pick(value, out.get(name, value))
        return out

    def tail(self, lines: int = 1) -> str:
        """The last lines that say something: of a failed run, its error."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - 20000))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        said = [line.strip() for line in text.splitlines() if line.strip()]
        said = [line for line in said if not line.startswith(ATTEMPT)]
        return "\n".join(said[-lines:])


def _number(value: Any) -> float | None:
    """fairseq writes numbers as texts."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
