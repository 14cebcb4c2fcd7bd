"""The figures of a report, drawn from its numbers alone."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy

from fairseq_dpq.figures import style

_LONG, _STEM = 28, 120  # characters of a name in a figure, and in that of its file


def draw_figures(report: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write all figures as SVG and PNG. Returns the text of each SVG, by the key that the page asks
    for."""
    out: dict[str, str] = {}
    stems: set[str] = set()
    with warnings.catch_warnings():
        # A name in a script that the font lacks: the SVG has it as text, in the reader's font.
        warnings.filterwarnings("ignore", message="Glyph")
        for key, height, draw, *what in _figures(report):
            stem = re.sub(r"[^A-Za-z0-9]+", "-", key)[:_STEM].strip("-").lower()
            while stem in stems:
                stem += "-2"
            stems.add(stem)
            with style.figure((style.WIDE[0], height)) as figure:
                draw(figure, *what)
                svg, _ = style.save(figure, folder / stem)
            out[key] = svg.read_text(encoding="utf-8")
    return out


def _figures(report: dict[str, Any]) -> Iterator[Any]:
    """Of each figure: key, height in inches, and how it is drawn."""
    models = report["models"]
    tables = [(model, table) for model in models for table in model["tables"]]
    if tables:
        bars = len(models) + (without_codes(models) is not None)
        yield "sizes", 0.9 + 0.32 * bars, _sizes, models
    for model, table in tables:
        if "use" in table:
            height = min(6.0, max(2.2, 1.2 + 0.11 * table["D"]))
            yield f"codes {model['name']} {table['path']}", height, code_map, table
    far = [(m, t) for m, t in tables if (t.get("distances") or {}).get("measured")]
    order = [model["name"] for model in models]
    if far:
        yield "distances", 2.4 * math.ceil(len(far) / 2), _distances, far, order
    if report["changes"]:
        yield "changes", style.WIDE[1], _changes, report["changes"]
    panels = _panels(report["curves"])
    if panels:
        height = 2.5 * math.ceil(len(panels) / 2)
        yield "curves", height, _curves, report["curves"], panels, order


def short(name: str) -> str:
    """A name that fits into a figure."""
    return name if len(name) <= _LONG else "…" + name[1 - _LONG :]


def without_codes(models: Sequence[dict[str, Any]]) -> dict[str, int] | None:
    """What the first compressed model would take with full tables, if no full model is shown."""
    sizes = [m["sizes"] for m in models if m["kind"] != "full"]
    if len(sizes) < len(models) or not all(own.get("full_embedding_bytes") for own in sizes):
        return None
    full, first = sizes[0]["full_embedding_bytes"], sizes[0]
    whole = first["model_bytes"] - first["embedding_bytes"] + full
    return {"embedding_bytes": full, "model_bytes": whole}


def _sizes(figure: Any, models: Sequence[dict[str, Any]]) -> None:
    columns = {
        "embeddings": "embedding_bytes",
        "model without optimiser": "model_bytes",
        "file": "file_bytes",
    }
    bars = [(short(m["name"]), style.series_color(i), m["sizes"]) for i, m in enumerate(models)]
    before = without_codes(models)
    if before is not None:
        bars.insert(0, ("full table (float32)", style.LIGHT.muted, before))
    names, colors, sizes = zip(*bars)
    panels = figure.subplots(1, 3, sharey=True)
    panels[0].invert_yaxis()
    for axes, (title, name) in zip(panels, columns.items()):
        shown = [own.get(f"compact_{name}") or own.get(name, 0) for own in sizes]
        axes.barh(range(len(bars)), shown, color=colors, height=0.62)
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(len(bars)), names)
        axes.tick_params(axis="y", length=0, labelcolor=style.LIGHT.ink)
        axes.set_xticks([])
        axes.grid(False)
        axes.spines[["bottom", "left"]].set_visible(False)
        top = max(*shown, 1)
        axes.set_xlim(0, 1.45 * top)
        for y, size in enumerate(shown):
            if size:
                axes.text(size + 0.03 * top, y, style.human(size), va="center", fontsize=8)


def code_map(figure: Any, table: dict[str, Any]) -> None:
    """Groups x codes (appendix C.1): the share of symbols with each code; entropy beside it."""
    from matplotlib.colors import PowerNorm

    counts = numpy.array(table["use"]["counts"], dtype=float)
    share = 100 * counts / numpy.maximum(counts.sum(1, keepdims=True), 1)
    for group, size in enumerate(table["use"]["sizes"]):
        share[group, size:] = numpy.nan  # a group with fewer codes
    left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [5, 1.25]})
    top = float(numpy.nanmax(share)) if share.size else 0
    image = style.heat_map(left, share, norm=PowerNorm(0.5, 0, max(top, 1e-9)))
    left.set_xlabel("code")
    left.set_ylabel("group")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.yaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=left, pad=0.015, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label("% of symbols", fontsize=8)
    bar.ax.tick_params(labelsize=7, length=0)
    entropy = table["use"]["entropy_bits"]
    right.barh(range(len(entropy)), entropy, color=style.LIGHT.series[0], height=0.8)
    right.set_xlim(0, max(math.log2(max(table["K"], 2)), 1e-9) * 1.02)
    right.set_xlabel("entropy, bits")
    right.tick_params(axis="y", length=0, labelleft=False)
    right.grid(axis="y", visible=False)
    right.spines["left"].set_visible(False)


def _distances(figure: Any, far: Sequence[tuple[Any, Any]], order: list[str]) -> None:
    several = len({table["path"] for _, table in far}) > 1
    for axes, (model, table) in _two_columns(figure, far):
        histogram = table["distances"]["relative"]["histogram"]
        share = numpy.array(histogram["counts"]) * 100 / max(sum(histogram["counts"]), 1)
        edges = histogram["edges"]
        color = style.series_color(order.index(model["name"]))
        axes.bar(edges[:-1], share, width=edges[1] - edges[0], align="edge", color=color)
        title = f"{model['name']} {table['path']}" if several else model["name"]
        axes.set_title(short(title), fontsize=9)
        axes.set_xlabel("distance / length of the query")
        axes.set_ylabel("% of symbols")
        axes.grid(axis="x", visible=False)


def _changes(figure: Any, changes: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for path in dict.fromkeys(change["table"] for change in changes):
        own = [change for change in changes if change["table"] == path]
        names = [short(change["to"]) for change in own]
        for what, marker in (("codes", "o"), ("symbols", "s")):
            shares = [100 * change[what] for change in own]
            axes.plot(range(len(own)), shares, marker=marker, label=f"{short(path)}: {what}")
    axes.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0)
    axes.set_ylabel("% changed since the checkpoint before")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.1)
    axes.legend()


_PANELS = {
    "loss": "loss",
    "ppl": "perplexity",
    "dpq_changed": "codes changed since the last validation, %",
    "dpq_entropy": "entropy of the codes, bits",
    "dpq_used": "codes in use, %",
}


def _panels(curves: dict[str, Any]) -> list[str]:
    have = {name.split(" ", 1)[1] for own in curves.values() for name in own}
    return [metric for metric in _PANELS if metric in have]


def _curves(figure: Any, curves: dict[str, Any], panels: list[str], order: list[str]) -> None:
    for axes, metric in _two_columns(figure, panels):
        factor = 100 if metric in ("dpq_changed", "dpq_used") else 1
        for number, (name, own) in enumerate(curves.items()):
            color = style.series_color(order.index(name) if name in order else number)
            thin: dict[str, Any] = {"alpha": 0.45, "linewidth": 1.2}
            for side, look in (("train", thin), ("valid", {})):
                points = own.get(f"{side} {metric}", [])
                if points:
                    x, y = zip(*points)
                    marker = "o" if side == "valid" and len(x) < 30 else None
                    named = side == "valid" or metric not in ("loss", "ppl")
                    look["label"] = short(name) if named else None
                    axes.plot(x, [factor * v for v in y], color=color, marker=marker, **look)
        if metric == "ppl":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(style.plain_number)
            axes.yaxis.set_minor_formatter("")
        axes.set_title(_PANELS[metric], fontsize=9)
        axes.set_xlabel("update")
        if axes.get_legend_handles_labels()[0]:
            axes.legend()


def _two_columns(figure: Any, entries: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """A panel for each entry, two beside each other."""
    panels = figure.subplots(math.ceil(len(entries) / 2), 2, squeeze=False).flatten()
    for axes in panels[len(entries) :]:
        axes.remove()
    yield from zip(panels, entries)
