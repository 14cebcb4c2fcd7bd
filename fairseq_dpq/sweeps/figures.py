"""The figures of a sweep: heat-maps of score and ratio over K and D (figure 3 of the paper), the
front of score against bytes, and the extra cost of training (figure 4)."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import numpy

from fairseq_dpq.figures import style
from fairseq_dpq.runs.logs import lower_is_better
from fairseq_dpq.sweeps.results import Result, front

_CELL, _EDGE = 0.62, 1.0  # inches of a cell, and of labels around a panel
_APART = 0.11  # labels of the front are at least this share of the axis apart
_MARKERS = "osD^v"


def axes_of(results: Sequence[Result]) -> tuple[list[int], list[int]]:
    """The values of K and of D, in order."""
    coded = [r for r in results if r.method]
    return sorted({r.K for r in coded}), sorted({r.D for r in coded})


def variants(results: Sequence[Result]) -> list[tuple[str, bool]]:
    """Method and sharing of the runs, each once."""
    return list(dict.fromkeys((r.method, r.shared) for r in results if r.method))


def matrix(
    results: Sequence[Result],
    method: str | None,
    shared: bool,
    value: Callable[[Result], float | None],
) -> numpy.ndarray:
    """A value of each run, rows by K, columns by D; NaN where there is no result. Without a method
    the first run at each place counts, whatever its method."""
    Ks, Ds = axes_of(results)
    out = numpy.full((len(Ks), len(Ds)), math.nan)
    for r in results:
        mine = r.method == method if method else r.method
        if mine and r.shared == shared and r.done:
            place, found = (Ks.index(r.K), Ds.index(r.D)), value(r)
            if found is not None and math.isnan(out[place]):
                out[place] = found
    return out


def extra_time(r: Result, full: Result) -> float | None:
    """How much longer an update takes than with the full table, in percent."""
    own, other = r.seconds_per_update(), full.seconds_per_update()
    return None if own is None or other is None else 100 * (own / other - 1)


def extra_memory(r: Result, full: Result) -> float | None:
    """Peak memory above that of the full table, in megabytes: of the GPU where there is one, else
    of the process."""
    if r.gpu_gb_free is not None and full.gpu_gb_free is not None:
        return 1024 * (full.gpu_gb_free - r.gpu_gb_free)
    if r.peak_bytes is None or full.peak_bytes is None:
        return None
    return (r.peak_bytes - full.peak_bytes) / 1e6


def title(method: str, shared: bool) -> str:
    """A variant as panels and legends name it."""
    return f"DPQ-{method.upper()}" + (", shared subspaces" if shared else "")


def words(metric: str) -> str:
    """A metric as the figures name it."""
    known = {"ppl": "perplexity", "nll_loss": "loss without smoothing", "bleu": "BLEU"}
    return f"valid {known.get(metric, metric)}"


def short(number: float) -> str:
    """Three digits, or all digits of a larger whole number."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


class Panel(NamedTuple):
    """One heat-map."""

    title: str
    values: numpy.ndarray
    text: Callable[[float], str] = short
    low: bool = False  # whether low values are the better ones, at the bright end of the scale
    log: bool = False  # whether colours are by the logarithm


def draw_all(results: Sequence[Result], metric: str, out: Path) -> list[Path]:
    """Draw every figure that the results have data for; the files, SVG and PNG of each."""
    out.mkdir(parents=True, exist_ok=True)
    return [
        *heat_maps(results, metric, out / "heat-maps"),
        *score_against_bytes(results, metric, out / "front"),
        *cost(results, out / "cost"),
    ]


def _draw(results: Sequence[Result], stem: Path, panels: list[list[Panel]]) -> list[Path]:
    """Heat-maps in rows."""
    Ks, Ds = axes_of(results)
    if all(numpy.isnan(panel.values).all() for row in panels for panel in row):
        return []
    columns = max(map(len, panels))
    size = columns * (_CELL * len(Ds) + _EDGE), len(panels) * (_CELL * 0.8 * len(Ks) + _EDGE)
    with style.figure((max(size[0], 3.6), size[1])) as figure:
        grid = figure.subplots(len(panels), columns, squeeze=False)
        for places, row in zip(grid, panels):
            for axes in places[len(row) :]:
                axes.set_visible(False)
            for axes, panel in zip(places, row):
                _heat_map(axes, panel)
                axes.set_xticks(range(len(Ds)), Ds)
                axes.set_yticks(range(len(Ks)), Ks)
                axes.set_xlabel("D, groups")
                axes.set_ylabel("K, codes in a group")
        return style.save(figure, stem)


def _heat_map(axes: Any, panel: Panel) -> None:
    shown = numpy.log(panel.values) if panel.log else panel.values
    texts = [["" if math.isnan(x) else panel.text(x) for x in line] for line in panel.values]
    known = shown[~numpy.isnan(shown)]
    limits = {"vmin": known.min(), "vmax": known.max()} if known.size else {}
    style.heat_map(axes, shown, texts, cmap=style.HEAT + ("_r" if panel.low else ""), **limits)
    axes.set_title(panel.title)


def heat_maps(results: Sequence[Result], metric: str, stem: Path) -> list[Path]:
    """Score and ratio over K and D; brighter is better. Scores are coloured by their logarithm
    where they are far apart."""
    low = lower_is_better(metric)
    scores = [r.scores[metric] for r in results if r.done and r.scores.get(metric, 0) > 0]
    far = bool(scores) and max(scores) > 4 * min(scores) and len(scores) == len(results)
    panels: dict[bool, list[Panel]] = {}
    for method, shared in sorted(variants(results), key=lambda variant: variant[1]):
        values = matrix(results, method, shared, lambda r: r.scores.get(metric))
        name = f"{title(method, shared)}: {words(metric)}"
        panels.setdefault(shared, []).append(Panel(name, values, low=low, log=far))
    for shared, row in panels.items():
        ratios = matrix(results, None, shared, lambda r: r.ratio)
        name = "compression ratio" + (", shared subspaces" if shared else "")
        row.append(Panel(name, ratios, log=True))
    return _draw(results, stem, list(panels.values()))


def cost(results: Sequence[Result], stem: Path) -> list[Path]:
    """Time and memory above those of the full table."""
    full = next((r for r in results if r.method is None and r.done), None)
    if full is None:
        return []
    panels = []
    for what, extra in (("extra time, %", extra_time), ("extra memory, MB", extra_memory)):
        row = []
        for variant in variants(results):
            values = matrix(results, *variant, partial(extra, full=full))
            name = f"{title(*variant)}: {what}"
            row.append(Panel(name, values, lambda x: f"{x:+.0f}", low=True))
        panels.append(row)
    return _draw(results, stem, panels)


def score_against_bytes(results: Sequence[Result], metric: str, stem: Path) -> list[Path]:
    """Every run by bytes and score, the front as a line, the full table as a dashed line."""
    able = [r for r in results if r.done and r.bytes and r.method and metric in r.scores]
    if not able:
        return []
    best = front(results, metric)
    low = lower_is_better(metric)
    with style.figure(style.WIDE) as figure:
        axes = figure.subplots()

        def plot(runs: Sequence[Result], marker: str, **look: Any) -> None:
            scores = [r.scores[metric] for r in runs]
            axes.plot([r.bytes or 0 for r in runs], scores, marker, **look)

        for number, variant in enumerate(variants(results)):
            mine = [r for r in able if (r.method, r.shared) == variant]
            marker, colour = _MARKERS[number % len(_MARKERS)], style.series_color(number)
            plot(mine, marker, color=colour, label=title(*variant))
        plot(best, "-", color=style.LIGHT.muted, linewidth=1, zorder=1, label="front")
        axes.set_xscale("log")
        axes.set_xlim(0.8 * min(r.bytes or 0 for r in able), 1.25 * max(r.bytes or 0 for r in able))
        for r, near_the_end in _labelled(best, axes.get_xlim()):
            axes.annotate(
                f"K={r.K} D={r.D}",
                (r.bytes, r.scores[metric]),
                (0, -12 if low else 7),
                textcoords="offset points",
                ha="right" if near_the_end else "center",
                fontsize=7,
                color=style.LIGHT.ink,
            )
        scores = [r.scores[metric] for r in able]
        full = next((r for r in results if r.method is None and metric in r.scores), None)
        if full is not None:
            scores.append(full.scores[metric])
            known = "" if full.bytes is None else f", {full.bytes:,} bytes"
            look: Any = {"color": style.LIGHT.ink, "linestyle": "--", "linewidth": 1}
            axes.axhline(full.scores[metric], label=f"full table{known}", **look)
        if min(scores) > 0 and max(scores) > 4 * min(scores):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(style.plain_number)
            axes.yaxis.set_minor_formatter(style.plain_number)
        axes.margins(y=0.12)
        mark_bytes(axes)
        axes.set_xlabel("size of the tables")
        axes.set_ylabel(f"{words(metric)}, {'lower' if low else 'higher'} is better")
        axes.legend()
        return style.save(figure, stem)


def mark_bytes(axes: Any) -> None:
    """Ticks of a logarithmic axis of bytes."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(style.human)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _labelled(best: list[Result], limits: tuple[float, float]) -> list[tuple[Result, bool]]:
    """Runs of the front whose labels do not touch, from the largest down, each with whether it is
    at the right end."""
    first, last = map(math.log, limits)
    out: list[tuple[Result, bool]] = []
    previous = math.inf
    for result in reversed(best):
        place = (math.log(result.bytes or 1) - first) / (last - first)
        if previous - place >= _APART:
            out.append((result, place > 1 - _APART / 2))
            previous = place
    return out
