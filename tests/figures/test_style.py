"""Figures: the same bytes each time, both themes in one SVG, cells of heat maps."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy
import pytest

from fairseq_dpq.figures import style

pytest.importorskip("matplotlib")


def _saved(folder: Path, name: str) -> tuple[str, bytes]:
    with style.figure((4.4, 3.2)) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [2, 3], label="$x$ & <b>")
        axes.legend()
        svg, png = style.save(figure, folder / name)
    return svg.read_text(encoding="utf-8"), png.read_bytes()


def test_same_figure_gives_same_bytes(tmp_path: Path) -> None:
    assert _saved(tmp_path, "one") == _saved(tmp_path, "two")


def test_name_with_a_dot_keeps_it(tmp_path: Path) -> None:
    _saved(tmp_path, "model.v2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.v2.png", "model.v2.svg"]


def test_every_colour_of_the_figure_has_a_dark_one(tmp_path: Path) -> None:
    """What the SVG paints is repainted, except by the rules themselves."""
    svg, _ = _saved(tmp_path, "plot")
    drawing = svg[svg.index("</style>") :]
    painted = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing))
    repainted = {
        **dict(zip(style.LIGHT[:4], style.DARK[:4])),
        **dict(zip(style.LIGHT.series, style.DARK.series)),
    }
    assert style.LIGHT.series[0] in painted and style.LIGHT.ink in painted
    assert painted <= set(repainted)
    for light in painted:
        assert f'[style*="fill: {light}"]{{fill:{repainted[light]} !important}}' in svg


def test_text_of_a_symbol_is_plain(tmp_path: Path) -> None:
    """Neither mathematics nor markup is read in a label."""
    svg, _ = _saved(tmp_path, "plot")
    assert ">$x$ &amp; &lt;b&gt;</text>" in svg


def test_png_has_the_stated_size(tmp_path: Path) -> None:
    _, png = _saved(tmp_path, "plot")
    from PIL import Image

    assert Image.open(io.BytesIO(png)).size == (int(4.4 * 150), int(3.2 * 150))


def test_heat_map_cells_and_text_colours() -> None:
    values = numpy.array([[0.0, 1.0], [2.0, 3.0]])
    with style.figure() as figure:
        axes = figure.subplots()
        image = style.heat_map(axes, values, [["0", "1"], ["2", "3"]])
        assert numpy.array_equal(image.get_array(), values)
        colors = {t.get_text(): t.get_color() for t in axes.texts}
    assert colors["0"] == style.ON_DARK_CELL and colors["3"] == style.ON_LIGHT_CELL


def test_human_sizes() -> None:
    sizes = (0, 999, 2500, 45_584, 1_307_411, 6e9)
    texts = ["0 B", "999 B", "2.5 kB", "45.6 kB", "1.31 MB", "6 GB"]
    assert [style.human(size) for size in sizes] == texts
