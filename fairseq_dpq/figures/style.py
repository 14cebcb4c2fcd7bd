"""The style of every figure: colours, sizes, fonts. A figure is saved as a PNG in light colours and
as an SVG that turns dark where the reader's system is dark."""

from __future__ import annotations

import io
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Sequence

from fairseq_dpq.files.errors import CheckpointError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = (7.2, 3.2)  # inches: a curve or bars across the page
DPI = 150
HEAT = "viridis"  # the same in both themes, and readable in grey


class Palette(NamedTuple):
    """The colours of one theme. `series` are told apart by colour-blind readers as well."""

    surface: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


LIGHT = Palette(
    "#ffffff",
    "#1f2430",
    "#667085",
    "#e4e7ee",
    ("#2f6fb3", "#d9622b", "#2b8a5f", "#8b5cb8", "#b58a1b", "#c23b62"),
)
DARK = Palette(
    "#161b24",
    "#e6e8ee",
    "#9aa3b5",
    "#2c3444",
    ("#6fb1f5", "#f59a62", "#5fcf9a", "#c39bf0", "#e3c04f", "#f2789c"),
)
# On the cells of a heat map the text has one of these two, in both themes.
ON_DARK_CELL, ON_LIGHT_CELL = "#fdfdfd", "#101010"


class FiguresUnavailable(CheckpointError):
    """matplotlib is not installed; the text is for the user."""


def require_matplotlib() -> None:
    """Import it, quietly: where fairseq is loaded, every message of every library is shown."""
    log = logging.getLogger("matplotlib")
    if log.level == logging.NOTSET:
        log.setLevel(logging.WARNING)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FiguresUnavailable(
            "figures need matplotlib: pip install 'fairseq-dpq[plots]'"
        ) from error


def series_color(number: int) -> str:
    """The colour of a model or of a method, in all figures."""
    return LIGHT.series[number % len(LIGHT.series)]


def settings() -> Any:
    """matplotlib's parameters for all figures."""
    from cycler import cycler

    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"],
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": LIGHT.ink,
        "axes.labelsize": 9,
        "axes.labelcolor": LIGHT.muted,
        "axes.edgecolor": LIGHT.grid,
        "axes.facecolor": LIGHT.surface,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=LIGHT.series),
        "grid.color": LIGHT.grid,
        "grid.linewidth": 0.8,
        "figure.facecolor": LIGHT.surface,
        "savefig.facecolor": LIGHT.surface,
        "text.color": LIGHT.ink,
        "text.parse_math": False,  # a symbol may contain dollar signs
        "xtick.color": LIGHT.grid,
        "ytick.color": LIGHT.grid,
        "xtick.labelcolor": LIGHT.muted,
        "ytick.labelcolor": LIGHT.muted,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "image.cmap": HEAT,
        # Text stays text: small files, searchable, in the reader's own fonts.
        "svg.fonttype": "none",
        # Without a fixed salt the ids inside differ from run to run.
        "svg.hashsalt": "fairseq-dpq",
    }


@contextmanager
def figure(size: tuple[float, float] = WIDE) -> Iterator[Figure]:
    """A figure in this style, outside pyplot's global state. Draw and save it inside `with`."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(settings()):
        made = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(made)
        yield made


def save(made: Figure, stem: Path) -> list[Path]:
    """Write `stem`.svg and `stem`.png; the same figure gives the same bytes."""
    svg, png = stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")
    svg.write_text(svg_text(made), encoding="utf-8")
    made.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    return [svg, png]


def svg_text(made: Figure) -> str:
    """The figure as SVG with both themes."""
    buffer = io.StringIO()
    made.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    start = text.index(">", text.index("<svg")) + 1
    return f"{text[:start]}\n <style>{dark_rules()}</style>{text[start:]}"


def dark_rules() -> str:
    """Rules that repaint the light colours in a dark theme. Programs without them show light."""
    pairs = zip([*LIGHT[:4], *LIGHT.series], [*DARK[:4], *DARK.series])
    rules = [
        f'[style*="{name}: {light}"]{{{name}:{dark} !important}}'
        for light, dark in pairs
        for name in ("fill", "stroke")
    ]
    return "@media screen and (prefers-color-scheme: dark){" + "".join(rules) + "}"


def plain_number(value: float, position: float | None = None) -> str:
    """A tick label, for logarithmic axes: matplotlib's own are formulas, which are off here."""
    return f"{value:g}"


def human(size: float, position: float | None = None) -> str:
    """Bytes in the unit that people read: 1.2 MB. Also a tick label."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def heat_map(axes: Axes, values: Any, texts: Sequence[Sequence[str]] = (), **options: Any) -> Any:
    """Draw a matrix as coloured cells, with a text in each cell if given. `options` go to `imshow`
    (vmin, vmax, norm). Returns the image, which a colour bar needs."""
    # Interpolation "none" keeps one pixel a cell in the SVG, which stays small.
    options = {"cmap": HEAT, "interpolation": "none", "aspect": "auto", **options}
    image = axes.imshow(values, **options)
    axes.grid(False)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    for y, line in enumerate(texts):
        for x, text in enumerate(line):
            shade = image.cmap(image.norm(values[y][x]))
            bright = 0.299 * shade[0] + 0.587 * shade[1] + 0.114 * shade[2] > 0.5
            color = ON_LIGHT_CELL if bright else ON_DARK_CELL
            axes.text(x, y, text, ha="center", va="center", color=color, fontsize=8)
    return image
