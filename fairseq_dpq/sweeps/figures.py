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
from fairseq_dpq.sweeps.results import Result, compared, front

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
    """A value of each run, rows by K, columns by D; NaN where there is no result."""
    Ks, Ds = axes_of(results)
    out = numpy.full((len(Ks), len(Ds)), math.nan)
    for r in results:
        if r.done and (r.method, r.shared) == (method, shared):
            found = value(r)
            out[Ks.index(r.K), Ds.index(r.D)] = math.nan if found is None else found
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


class Measure(NamedTuple):
    """What a row of heat-maps shows of the runs."""

    name: str
    value: Callable[[Result], float | None]
    text: Callable[[float], str] = short
    low: bool = False  # whether low values are the better ones, at the bright end of the scale
    log: bool = True  # whether colours are by the logarithm of values that are far apart


def draw_all(results: Sequence[Result], metric: str, out: Path) -> list[Path]:
    """Draw every figure that the results have data for; the files, SVG and PNG of each."""
    out.mkdir(parents=True, exist_ok=True)
    return [
        *heat_maps(results, metric, out / "heat-maps"),
        *score_against_bytes(results, metric, out / "front"),
        *cost(results, out / "cost"),
    ]


def _draw(results: Sequence[Result], stem: Path, rows: Sequence[Measure]) -> list[Path]:
    """Heat-maps: a row for each measure, a column for each method and sharing."""
    Ks, Ds = axes_of(results)
    columns = variants(results)
    tables = [[matrix(results, *column, row.value) for column in columns] for row in rows]
    if numpy.isnan(tables).all():
        return []
    width, height = _CELL * len(Ds) + _EDGE, _CELL * 0.8 * len(Ks) + _EDGE
    with style.figure((max(width * len(columns), 3.6), height * len(rows))) as figure:
        grid = figure.subplots(len(rows), len(columns), squeeze=False)
        for places, row, line in zip(grid, rows, tables):
            for axes, variant, values in zip(places, columns, line):
                _heat_map(axes, row, values)
                axes.set_title(f"{title(*variant)}: {row.name}")
                axes.set_xticks(range(len(Ds)), Ds)
                axes.set_yticks(range(len(Ks)), Ks)
                axes.set_xlabel("D, groups")
                axes.set_ylabel("K, codes in a group")
        return style.save(figure, stem)


def _heat_map(axes: Any, row: Measure, values: numpy.ndarray) -> None:
    texts = [["" if math.isnan(x) else row.text(x) for x in line] for line in values]
    far = row.log and _far_apart(values[~numpy.isnan(values)].tolist())
    colours = style.HEAT + ("_r" if row.low else "")
    style.heat_map(axes, numpy.log(values) if far else values, texts, cmap=colours)


def _far_apart(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > 4 * min(values) > 0


def heat_maps(results: Sequence[Result], metric: str, stem: Path) -> list[Path]:
    """Score and ratio over K and D; brighter is better."""
    low = lower_is_better(metric)
    score = Measure(words(metric), lambda r: r.scores.get(metric), low=low)
    return _draw(results, stem, [score, Measure("compression ratio", lambda r: r.ratio)])


def cost(results: Sequence[Result], stem: Path) -> list[Path]:
    """Time and memory above those of the full table."""
    full = next((r for r in results if r.method is None and r.done), None)
    if full is None:
        return []
    extras = {"extra time, %": extra_time, "extra memory, MB": extra_memory}
    rows = [
        Measure(name, partial(extra, full=full), "{:+.0f}".format, low=True, log=False)
        for name, extra in extras.items()
    ]
    return _draw(results, stem, rows)


def score_against_bytes(results: Sequence[Result], metric: str, stem: Path) -> list[Path]:
    """Every run by bytes and score, the front as a line, the full table as a dashed line."""
    able, best = compared(results, metric), front(results, metric)
    if not able:
        return []
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
        least, most = (pick(r.bytes or 0 for r in able) for pick in (min, max))
        axes.set_xlim(0.8 * least, 1.4 * most)
        for r in _labelled(best, (1.75 * most / least) ** _APART):
            at, label = (r.bytes, r.scores[metric]), f"K={r.K} D={r.D}"
            offset: Any = {"xytext": (0, -12 if low else 7), "textcoords": "offset points"}
            axes.annotate(label, at, **offset, ha="center", fontsize=7, color=style.LIGHT.ink)
        scores = [r.scores[metric] for r in able]
        full = next((r for r in results if r.method is None and metric in r.scores), None)
        if full is not None:
            scores.append(full.scores[metric])
            known = "" if full.bytes is None else f", {full.bytes:,} bytes"
            look: Any = {"color": style.LIGHT.ink, "linestyle": "--", "linewidth": 1}
            axes.axhline(full.scores[metric], label=f"full table{known}", **look)
        if _far_apart(scores):
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


def _labelled(best: list[Result], factor: float) -> list[Result]:
    """Runs of the front whose labels do not touch, from the largest down: those whose sizes differ
    by this factor."""
    out: list[Result] = []
    for result in reversed(best):
        if not out or (out[-1].bytes or 0) >= factor * (result.bytes or 0):
            out.append(result)
    return out
