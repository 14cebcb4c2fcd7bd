"""The figures of a sweep: heat-maps of score and ratio over K and D (figure 3 of the paper), the
front of score against bytes, and the extra cost of training (figure 4)."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Callable, Sequence

from fairseq_dpq.figures import style
from fairseq_dpq.runs.logs import lower_is_better
from fairseq_dpq.sweeps.results import Result, front

_CELL, _EDGE = 0.62, 1.0  # inches of a cell, and of labels around a panel
_APART = 0.11  # labels of the front are at least this share of the axis apart
_MARKERS = "osD^v"

Value = Callable[[Result], "float | None"]


def axes_of(results: Sequence[Result]) -> tuple[list[int], list[int]]:
    """The values of K and of D, in order."""
    coded = [r for r in results if r.method]
    return sorted({r.K for r in coded}), sorted({r.D for r in coded})


def variants(results: Sequence[Result]) -> list[tuple[str, bool]]:
    """Method and sharing of the runs, each once."""
    return list(dict.fromkeys((r.method, r.shared) for r in results if r.method))


def matrix(
    results: Sequence[Result], method: str | None, shared: bool, value: Value
) -> list[list[float]]:
    """A value of each run, rows by K and columns by D; NaN where there is no result. Without a
    method the first run at each place counts, whatever its method."""
    Ks, Ds = axes_of(results)
    out = [[math.nan] * len(Ds) for _ in Ks]
    for r in results:
        mine = r.method is not None and (method is None or r.method == method)
        fits = mine and r.shared == shared and r.done
        found = value(r) if fits else None
        if found is not None and math.isnan(out[Ks.index(r.K)][Ds.index(r.D)]):
            out[Ks.index(r.K)][Ds.index(r.D)] = found
    return out


def extra_time(results: Sequence[Result]) -> Value:
    """How much longer an update takes than with the full table, in percent."""
    full = next((r.seconds_per_update() for r in results if r.method is None), None)

    def value(r: Result) -> float | None:
        own = r.seconds_per_update()
        return None if full is None or own is None else 100 * (own / full - 1)

    return value


def extra_memory(results: Sequence[Result]) -> Value:
    """Peak memory above that of the full table, in megabytes: of the GPU where there is one, else
    of the process."""
    full = next((r for r in results if r.method is None and r.done), None)

    def value(r: Result) -> float | None:
        if full is None:
            return None
        if r.gpu_gb_free is not None and full.gpu_gb_free is not None:
            return 1024 * (full.gpu_gb_free - r.gpu_gb_free)
        if r.peak_bytes is None or full.peak_bytes is None:
            return None
        return (r.peak_bytes - full.peak_bytes) / 1e6

    return value


def title(method: str, shared: bool) -> str:
    """A variant as panels and legends name it."""
    return f"DPQ-{method.upper()}" + (", shared subspaces" if shared else "")


def words(metric: str) -> str:
    """A metric as the figures name it."""
    known = {"ppl": "perplexity", "nll_loss": "loss without smoothing", "bleu": "BLEU"}
    return f"valid {known.get(metric, metric)}"


def short_bytes(number: float, position: float = 0) -> str:
    """Bytes as an axis names them."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:g} {unit}"
    return f"{number:g} B"


def short(number: float) -> str:
    """Three digits, or all digits of a larger whole number."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def draw_all(results: Sequence[Result], metric: str, out: Path) -> list[Path]:
    """Draw every figure that the results have data for; the files, SVG and PNG of each."""
    out.mkdir(parents=True, exist_ok=True)
    # fairseq lets every library log its details.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    files: list[Path] = []
    for name, draw in (("heat-maps", heat_maps), ("front", score_against_bytes), ("cost", cost)):
        files += draw(results, metric, out / name)
    return files


def _panels(
    results: Sequence[Result], stem: Path, panels: list[list[tuple[str, Any, dict[str, Any]]]]
) -> list[Path]:
    """Heat-maps in rows: a title, the matrix, and `text` to word a value, `best` for the bright end
    of the scale (low or high)."""
    Ks, Ds = axes_of(results)
    if not any(not math.isnan(x) for row in panels for _, m, _ in row for line in m for x in line):
        return []
    wide = max(len(row) for row in panels) * (_CELL * len(Ds) + _EDGE)
    high = len(panels) * (_CELL * 0.8 * len(Ks) + _EDGE)
    with style.figure((max(wide, 3.6), high)) as figure:
        grid = figure.subplots(len(panels), max(map(len, panels)), squeeze=False)
        for places, row in zip(grid, panels):
            for axes in places[len(row) :]:
                axes.set_visible(False)
            for axes, (name, values, how) in zip(places, row):
                known = [x for line in values for x in line if not math.isnan(x)]
                texts = [["" if math.isnan(x) else how["text"](x) for x in line] for line in values]
                colours: dict[str, Any] = {
                    "cmap": style.HEAT + ("_r" if how["best"] == "low" else "")
                }
                if known:
                    scale = [math.log(x) for x in known] if how.get("log") else known
                    colours.update(vmin=min(scale), vmax=max(scale))
                shown = [[math.log(x) for x in v] for v in values] if how.get("log") else values
                style.heat_map(axes, shown, [*map(str, Ks)], [*map(str, Ds)], texts, **colours)
                axes.set_title(name)
                axes.set_xlabel("D, groups")
                axes.set_ylabel("K, codes in a group")
        return style.save(figure, stem)


def heat_maps(results: Sequence[Result], metric: str, stem: Path) -> list[Path]:
    """Score and ratio over K and D; brighter is better. Scores are coloured by their logarithm
    where they are far apart."""
    best = "low" if lower_is_better(metric) else "high"
    scores = [r.scores[metric] for r in results if r.done and r.scores.get(metric, 0) > 0]
    far = bool(scores) and max(scores) > 4 * min(scores) and len(scores) == len(results)
    panels = []
    for shared in sorted({shared for _, shared in variants(results)}):
        row: list[tuple[str, Any, dict[str, Any]]] = []
        for method in dict.fromkeys(m for m, s in variants(results) if s == shared):
            values = matrix(results, method, shared, lambda r: r.scores.get(metric))
            name = f"{title(method, shared)}: {words(metric)}"
            row.append((name, values, {"text": short, "best": best, "log": far}))
        ratios = matrix(results, None, shared, lambda r: r.ratio)
        name = "compression ratio" + (", shared subspaces" if shared else "")
        panels.append([*row, (name, ratios, {"text": short, "best": "high", "log": True})])
    return _panels(results, stem, panels)


def cost(results: Sequence[Result], metric: str, stem: Path) -> list[Path]:
    """Time and memory above those of the full table."""
    panels = []
    for what, unit, value in (
        ("extra time", "%", extra_time(results)),
        ("extra memory", "MB", extra_memory(results)),
    ):
        row: list[tuple[str, Any, dict[str, Any]]] = []
        for method, shared in variants(results):
            values = matrix(results, method, shared, value)
            how = {"text": lambda x: f"{x:+.0f}", "best": "low"}
            row.append((f"{title(method, shared)}: {what}, {unit}", values, how))
        panels.append(row)
    return _panels(results, stem, panels)


def score_against_bytes(results: Sequence[Result], metric: str, stem: Path) -> list[Path]:
    """Every run by bytes and score, the front as a line, the full table as a dashed line."""
    able = [r for r in results if r.done and r.bytes and r.method and metric in r.scores]
    if not able:
        return []
    best = front(results, metric)
    low = lower_is_better(metric)
    with style.figure(style.WIDE) as figure:
        axes = figure.subplots()
        colours = style.LIGHT.series
        for number, (method, shared) in enumerate(variants(results)):
            mine = [r for r in able if (r.method, r.shared) == (method, shared)]
            axes.plot(
                [r.bytes or 0 for r in mine],
                [r.scores[metric] for r in mine],
                _MARKERS[number % len(_MARKERS)],
                color=colours[number % len(colours)],
                label=title(method, shared),
            )
        axes.plot(
            [r.bytes or 0 for r in best],
            [r.scores[metric] for r in best],
            color=style.LIGHT.muted,
            linewidth=1,
            zorder=1,
            label="front",
        )
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
            text = "full table"
            if full.bytes is not None:
                text += f", {full.bytes:,} bytes"
            axes.axhline(
                full.scores[metric], color=style.LIGHT.ink, linestyle="--", linewidth=1, label=text
            )
        if min(scores) > 0 and max(scores) > 4 * min(scores):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(plain)
            axes.yaxis.set_minor_formatter(plain)
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
    axes.xaxis.set_major_formatter(short_bytes)
    axes.xaxis.set_minor_formatter(NullFormatter())


def plain(number: float, position: float = 0) -> str:
    """A tick without a power of ten."""
    return f"{number:g}"


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
