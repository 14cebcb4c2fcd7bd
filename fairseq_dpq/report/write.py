"""The files of a report: page, numbers, figures. Nothing is left behind if it fails midway."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.figures.style import FiguresUnavailable, require_matplotlib
from fairseq_dpq.files.checkpoint import Progress
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.writer import check_target, write_whole
from fairseq_dpq.report.build import build_report
from fairseq_dpq.report.curves import Curves
from fairseq_dpq.report.drawing import draw_figures
from fairseq_dpq.report.models import Model
from fairseq_dpq.report.page import render_page
from fairseq_dpq.report.search import search_data

PAGE, NUMBERS, FIGURES = "report.html", "report.json", "figures"


def check_folder(out: Path, inputs: list[Path], force: bool) -> None:
    """Refuse before any work: no matplotlib, a file in the way, a report that is there."""
    try:
        require_matplotlib()
    except FiguresUnavailable as error:
        raise CheckpointError(str(error)) from error
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"--out {out} is a file; give a folder")
    if not out.parent.is_dir():
        raise CheckpointError(f"the folder of --out {out} does not exist")
    if out.is_dir():
        for name in (PAGE, NUMBERS):
            check_target(out / name, inputs, force)


def write_report(
    models: Sequence[Model],
    out: Path,
    *,
    title: str = "DPQ report",
    words: Sequence[str] = (),
    reference: Model | None = None,
    curves: dict[str, Curves] | None = None,
    neighbours: int = 10,
    progress: Progress | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write the report into a folder; its numbers."""
    report = build_report(
        models,
        words=words,
        reference=reference,
        curves=curves,
        neighbours=neighbours,
        progress=progress,
    )
    search = search_data(models, neighbours, progress)
    made = not out.exists()
    out.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".figures-", dir=out) as work:
            figures = draw_figures(report, Path(work))
            page = render_page(report, search, figures, title)
            (out / FIGURES).mkdir(exist_ok=True)
            for file in sorted(Path(work).iterdir()):
                os.replace(file, out / FIGURES / file.name)
        text = json.dumps(report, indent=1, ensure_ascii=True)
        write_whole(out / NUMBERS, lambda file: _write(file, text), force=force)
        write_whole(out / PAGE, lambda file: _write(file, page), force=force)
    except BaseException:
        if made:
            shutil.rmtree(out, ignore_errors=True)
        raise
    return report


def _write(file: Any, text: str) -> None:
    file.write(text.encode("utf-8"))
