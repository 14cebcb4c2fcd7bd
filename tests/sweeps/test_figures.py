"""Figures of a sweep, against planted results."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from fairseq_dpq.sweeps import figures
from fairseq_dpq.sweeps.results import Result

pytest.importorskip("matplotlib")

_BOTH = ("SX", "VQ")


def _planted() -> list[Result]:
    """Perplexity 10 K + D with sx, one more with vq; time and memory grow with K D."""
    out = [
        Result("full", scores={"ppl": 15.0}, updates=100, cpu_seconds=50.0, peak_bytes=10**9),
    ]
    out[0].bytes = 64_000
    for extra, method in enumerate(("sx", "vq")):
        for K in (2, 8):
            for D in (4, 16, 32):
                if (K, D, method) == (8, 32, "vq"):
                    continue
                out.append(
                    Result(
                        f"{method}-{K}-{D}",
                        *(method, K, D),
                        scores={"ppl": 10.0 * K + D + extra},
                        updates=100,
                        cpu_seconds=50.0 * (1 + K * D / 1000),
                        peak_bytes=10**9 + K * D * 10**6,
                        full_bytes=64_000,
                        bytes=40 * K * D,
                        ratio=64_000 / (40 * K * D),
                    )
                )
    return out


def _texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def test_matrix_by_hand() -> None:
    runs = _planted()
    assert figures.axes_of(runs) == ([2, 8], [4, 16, 32])
    scores = figures.matrix(runs, "sx", False, lambda r: r.scores["ppl"])
    assert scores.tolist() == [[24, 36, 52], [84, 96, 112]]
    assert math.isnan(figures.matrix(runs, "vq", False, lambda r: r.scores["ppl"])[1][2])
    assert figures.matrix(runs, "sx", False, lambda r: r.ratio)[1].tolist() == [50, 12.5, 6.25]
    runs[1].status = "failed"
    assert math.isnan(figures.matrix(runs, "sx", False, lambda r: r.scores["ppl"])[0][0])


def test_extra_cost_by_hand(tmp_path: Path) -> None:
    full, *_ = runs = _planted()
    time = figures.matrix(runs, "sx", False, lambda r: figures.extra_time(r, full))
    assert [[round(x, 6) for x in row] for row in time] == [[0.8, 3.2, 6.4], [3.2, 12.8, 25.6]]
    memory = figures.matrix(runs, "vq", False, lambda r: figures.extra_memory(r, full))
    assert memory[0].tolist() == [8, 32, 64]
    runs[0].gpu_gb_free = 10.0
    runs[1].gpu_gb_free = 9.5  # on a GPU its memory counts
    assert figures.extra_memory(runs[1], full) == 512
    assert figures.cost(runs[1:], tmp_path / "cost") == []  # without a full table


def test_cells_and_lines_of_the_figures(tmp_path: Path) -> None:
    files = figures.draw_all(_planted(), "ppl", tmp_path / "figures")
    assert [path.name for path in files] == [
        *("heat-maps.svg", "heat-maps.png", "front.svg", "front.png", "cost.svg", "cost.png")
    ]
    assert all(path.stat().st_size < 100_000 for path in files)
    cells = _texts(files[0])
    shown = [
        f"DPQ-{m}: {what}" for what in ("valid perplexity", "compression ratio") for m in _BOTH
    ]
    assert [text for text in cells if len(text) > 15 and "K," not in text] == shown
    # 6 scores with sx, 5 with vq, and their ratios
    for text in ("24", "112", "25", "97", "200", "6.25"):
        assert text in cells
    assert "113" not in cells
    front = _texts(files[2])
    assert "full table, 64,000 bytes" in front and "DPQ-VQ" in front
    assert "K=2 D=4" in front and "K=2 D=32" not in front  # larger and worse
    cost = _texts(files[4])
    assert "+26" in cost and "+64" in cost and "DPQ-VQ: extra memory, MB" in cost


def test_brighter_is_better(tmp_path: Path) -> None:
    """The best cell has the bright end of the scale: dark text on it, whichever way is better."""
    from fairseq_dpq.figures import style

    for metric, best in (("ppl", "24"), ("bleu", "112")):
        runs = [r for r in _planted() if r.method != "vq"]
        for run in runs:
            run.scores = {metric: run.scores["ppl"]}
        (svg, _) = figures.heat_maps(runs, metric, tmp_path / metric)
        text = svg.read_text(encoding="utf-8")
        found = re.search(rf"<text[^>]*fill: (#\w+)[^>]*>{best}</text>", text)
        assert found is not None
        assert found.group(1) == style.ON_LIGHT_CELL


def test_nothing_to_draw(tmp_path: Path) -> None:
    failed = [Result("sx-2-4", "sx", 2, 4, status="failed")]
    assert figures.draw_all(failed, "ppl", tmp_path) == []
