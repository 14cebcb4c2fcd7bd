"""Curves of a training: from fairseq's log, in any of its formats, or from TensorBoard files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from fairseq_dpq.files.errors import CheckpointError

Points = List[Tuple[int, float]]
Curves = Dict[str, Points]  # "train loss", "valid ppl", ...: (update, value)

METRICS = ("loss", "ppl", "dpq_changed", "dpq_entropy", "dpq_used", "dpq_regularizer", "bleu")
_LINE = re.compile(r"\| (train_inner|train|valid\w*) \| (.*)$")
_PAIR = re.compile(r"(\w+)=([-+.\w]+)")
_MAX_LINE = 100_000  # a longer one is not a line of numbers


def read_curves(path: Path) -> Curves:
    """The curves of a log file or of a TensorBoard folder."""
    try:
        curves = _tensorboard(path) if path.is_dir() else _log(path)
    except OSError as error:
        raise CheckpointError(f"cannot read --log {path}: {error.strerror or error}") from error
    if not curves:
        kind = "TensorBoard file" if path.is_dir() else "line of fairseq's training log"
        raise CheckpointError(f"--log {path} has no {kind} with loss or perplexity")
    # A resumed training repeats some updates: the last of each counts.
    return {name: sorted(dict(points).items()) for name, points in sorted(curves.items())}


def _log(path: Path) -> Curves:
    curves: Curves = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            found = _LINE.search(line) if len(line) < _MAX_LINE else None
            if found is None:
                continue
            split, text = found.groups()
            _add(curves, "train" if split.startswith("train") else "valid", split, _entries(text))
    return curves


def _entries(text: str) -> dict[str, Any]:
    """The numbers of a line: a JSON object, `epoch 001 | loss 7.1 | ...` or `... loss=7.1, ...`."""
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}
    parts = [part.split() for part in text.split("|")]
    return {**dict(part for part in parts if len(part) == 2), **dict(_PAIR.findall(text))}


def _add(curves: Curves, side: str, split: str, entries: dict[str, Any]) -> None:
    entries = {key.replace(f"{split}_", "", 1): value for key, value in entries.items()}
    update = _number(entries.get("num_updates"))
    if update is None:
        return
    for name in METRICS:
        value = _number(entries.get(name))
        # The epoch's mean is not a point of the curve that the log of each interval draws.
        if value is not None and not (split == "train" and name in ("loss", "ppl")):
            curves.setdefault(f"{side} {name}", []).append((int(update), value))


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _tensorboard(folder: Path) -> Curves:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise CheckpointError(
            f"--log {folder}: TensorBoard files need its own reader: pip install tensorboard"
        ) from error
    curves: Curves = {}
    for part in _event_folders(folder):
        split = part.name if part != folder else "train_inner"
        if split == "train" and (part.parent / "train_inner").is_dir():
            continue
        events = EventAccumulator(str(part), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            if tag in METRICS:
                side = "train" if split.startswith("train") else "valid"
                points = [(e.step, e.value) for e in events.Scalars(tag) if math.isfinite(e.value)]
                curves.setdefault(f"{side} {tag}", []).extend(points)
    return curves


def _event_folders(folder: Path) -> Iterator[Path]:
    found = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    yield from sorted(found)
