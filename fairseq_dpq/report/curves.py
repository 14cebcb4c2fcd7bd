"""Curves of a training: from fairseq's log, in any of its formats, or from TensorBoard files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Dict, List, Tuple

from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.runs.logs import numbers_of

Points = List[Tuple[int, float]]
Curves = Dict[str, Points]  # "train loss", "valid ppl", ...: (update, value)

METRICS = ("loss", "ppl", "dpq_changed", "dpq_entropy", "dpq_used", "dpq_regularizer", "bleu")


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


def _side(section: str) -> str:
    return "train" if section.startswith("train") else "valid"


def _log(path: Path) -> Curves:
    curves: Curves = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for section, numbers in map(numbers_of, file):
            for name in METRICS if "num_updates" in numbers else ():
                # The epoch's mean is not a point of the curve that each interval's line draws.
                if name in numbers and not (section == "train" and name in ("loss", "ppl")):
                    point = int(numbers["num_updates"]), numbers[name]
                    curves.setdefault(f"{_side(section)} {name}", []).append(point)
    return curves


def _tensorboard(folder: Path) -> Curves:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise CheckpointError(
            f"--log {folder}: TensorBoard files need its own reader: pip install tensorboard"
        ) from error
    curves: Curves = {}
    for part in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        split = part.name if part != folder else "train_inner"
        if split == "train" and (part.parent / "train_inner").is_dir():
            continue
        events = EventAccumulator(str(part), size_guidance={"scalars": 0})
        events.Reload()
        for tag in set(events.Tags()["scalars"]) & set(METRICS):
            points = [(e.step, e.value) for e in events.Scalars(tag) if math.isfinite(e.value)]
            curves.setdefault(f"{_side(split)} {tag}", []).extend(points)
    return curves
