"""The report of the demo's models, as fairseq-dpq-report would write it."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from fairseq_dpq.checkpoints.errors import CheckpointError
from fairseq_dpq.demo import commands
from fairseq_dpq.demo.commands import MODELS
from fairseq_dpq.report.curves import read_curves
from fairseq_dpq.report.models import join_compact, load_model
from fairseq_dpq.report.write import PAGE, check_folder, write_report

FOLDER = "report"


def command() -> list[str]:
    """The command that writes the same report, in the demo's folder."""
    words = ["fairseq-dpq-report"]
    for model in MODELS:
        words.append(f"{model.title}={model.folder}/checkpoint_best.pt")
        if model.method is not None:
            words.append(f"{model.title} compact={commands.shipped(model)}")
    for model in MODELS:
        words += ["--log", f"{model.title}=logs/train-{model.folder}.log"]
    return [*words, "--title", "DPQ demo", "--out", FOLDER]


def write(out: Path) -> str:
    """Write it; the line to print. The demo has succeeded without it."""
    start = time.monotonic()
    try:
        check_folder(out / FOLDER, [], force=True)
        models, curves = [], {}
        for model in MODELS:
            models.append(load_model(out / model.folder / "checkpoint_best.pt", model.title, {}))
            if model.method is not None:
                name = f"{model.title} compact"
                models.append(load_model(out / commands.shipped(model), name, {}))
            curves[model.title] = read_curves(out / "logs" / f"train-{model.folder}.log")
        joined = join_compact(models)
        write_report(joined, out / FOLDER, title="DPQ demo", curves=curves, force=True)
    except CheckpointError as error:
        return f"no report: {error}"
    with open(out / "commands.txt", "a", encoding="utf-8") as log:
        log.write(shlex.join(command()) + "\n")
    seconds = time.monotonic() - start
    return f"Codes, neighbours and curves, in {seconds:.0f} s: {out / FOLDER / PAGE}"
