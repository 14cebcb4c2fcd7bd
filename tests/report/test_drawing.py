"""Figures show the numbers of the report: heat maps cell by cell, bars, lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fairseq_dpq.figures import style
from fairseq_dpq.report import drawing
from fairseq_dpq.report.build import build_report
from fairseq_dpq.report.models import load_model
from helpers.report_files import exported, full
from helpers.toy_checkpoints import make_layer, save_toy

pytest.importorskip("matplotlib")

TABLE: dict[str, Any] = {
    "path": "t",
    "K": 4,
    "D": 2,
    "use": {"counts": [[3, 1, 0, 0], [1, 1, 2, 0]], "sizes": [4, 3], "entropy_bits": [0.81, 1.5]},
}


def test_cells_of_the_code_map_are_shares_of_the_counts() -> None:
    with style.figure() as figure:
        drawing.code_map(figure, TABLE)
        cells = figure.axes[0].images[0].get_array().filled(-1)
        bars = [patch.get_width() for patch in figure.axes[1].patches]
    expected = numpy.array([[75, 25, 0, 0], [25, 25, 50, -1]])  # group 1 has three codes
    assert numpy.array_equal(cells, expected)
    assert bars == [0.81, 1.5]


def _lines(figure: Any) -> dict[str, list[float]]:
    return {
        line.get_label(): list(line.get_ydata())
        for axes in figure.axes
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def test_lines_of_change_are_percentages() -> None:
    changes = [
        {"table": "t", "from": "a", "to": "b", "codes": 0.25, "symbols": 0.5},
        {"table": "t", "from": "b", "to": "c", "codes": 0.1, "symbols": 0.2},
    ]
    with style.figure() as figure:
        drawing._changes(figure, changes)
        assert _lines(figure) == {"t: codes": [25, 10], "t: symbols": [50, 20]}
        assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["b", "c"]


def test_bars_of_sizes_are_those_of_the_compact_form() -> None:
    sizes = {"embedding_bytes": 900, "model_bytes": 2000, "file_bytes": 5000}
    compact = {"compact_embedding_bytes": 90, "compact_model_bytes": 1190}
    coded = {"name": "sx", "kind": "training", "sizes": {**sizes, **compact}}
    models = [{"name": "full", "kind": "full", "sizes": sizes}, coded]
    with style.figure() as figure:
        drawing._sizes(figure, models)
        widths = [[patch.get_width() for patch in axes.patches] for axes in figure.axes]
        texts = [text.get_text() for text in figure.axes[0].texts]
    assert widths == [[900, 90], [2000, 1190], [5000, 5000]]
    assert texts == ["900 B", "90 B"]
    # Without a full model, the size before is worked out; of a file nobody knows it.
    coded["sizes"]["full_embedding_bytes"] = 700
    with style.figure() as figure:
        drawing._sizes(figure, [coded])
        widths = [[patch.get_width() for patch in axes.patches] for axes in figure.axes]
        names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert widths == [[700, 90], [1800, 1190], [0, 5000]]
    assert names == ["full table (float32)", "sx"]


def test_curves_have_the_points_of_the_log() -> None:
    curves = {
        "sx": {"train loss": [(1, 3.0), (2, 2.0)], "valid loss": [(2, 2.5)]},
        "vq": {"valid loss": [(2, 2.75)], "valid dpq_changed": [(2, 0.5)]},
    }
    panels = drawing._panels(curves)
    assert panels == ["loss", "dpq_changed"]
    with style.figure() as figure:
        drawing._curves(figure, curves, panels, ["full", "sx", "vq"])
        loss, changed = figure.axes
        assert [list(line.get_ydata()) for line in loss.lines] == [[3.0, 2.0], [2.5], [2.75]]
        assert list(changed.lines[0].get_ydata()) == [50]
        colors = [line.get_color() for line in loss.lines]
    assert colors == [style.LIGHT.series[1], style.LIGHT.series[1], style.LIGHT.series[2]]


def test_files_of_a_report(tmp_path: Path) -> None:
    """One figure of each kind; names become file names that any system takes."""
    values = torch.randn(1, 300, 4)
    codes = torch.randint(0, 300, (40, 1), dtype=torch.int16)
    models = [
        load_model(full(tmp_path / "f.pt", torch.randn(60, 12)), "full", {}),
        load_model(save_toy(tmp_path / "a.pt", make_layer()), "a/../b <i>", {}),
        load_model(exported(tmp_path / "e.safetensors", codes, values), "日本語", {}),
    ]
    report = build_report(models)
    report["changes"] = [{"table": "t", "from": "a", "to": "b", "codes": 0.25, "symbols": 0.5}]
    out = tmp_path / "figures"
    out.mkdir()
    drawn = drawing.draw_figures(report, out)
    assert len(drawn) == 5 and all("<svg" in text for text in drawn.values())
    stems = [
        "changes",
        "codes-a-b-i-encoder-embed-tokens",
        "codes-encoder-embed-tokens",
        "distances",
        "sizes",
    ]
    files = sorted(path.name for path in out.iterdir())
    assert files == sorted(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg"))
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    drawing.draw_figures(report, out)
    assert first == {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    """Tables of a stranger's file may have names of any length, and the same beginning."""
    model = load_model(save_toy(tmp_path / "a.pt", make_layer()), "a", {})
    report = build_report([model])
    table = report["models"][0]["tables"][0]
    report["models"][0]["tables"] = [{**table, "path": "x" * 9000 + end} for end in "ab"]
    drawing.draw_figures(report, tmp_path)
    stems = [path.stem for path in tmp_path.glob("codes-*.svg")]
    assert len(stems) == 2 and all(len(stem) < 130 for stem in stems)
