"""report.html: one file with style, script, figures and data in it. It fetches nothing.

page.html is its template. Text cannot become markup there: Jinja escapes every expression, and
control characters are shown as escapes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from fairseq_dpq.figures import style
from fairseq_dpq.files.errors import printable
from fairseq_dpq.report.drawing import Drawn, human

_HERE = Path(__file__).parent
_GROUPS = 64  # groups of the code table that are shown
Rows = list  # of cells; the first row is the head


def render_page(
    report: dict[str, Any], search: dict[str, Any], figures: dict[str, Drawn], title: str
) -> str:
    """The whole page as text."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, finalize=_text
    )
    environment.filters["base64"] = lambda text: base64.b64encode(text.encode()).decode()
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    coded = [(m, t) for m in report["models"] for t in m["tables"] if "use" in t]
    words = dict.fromkeys(entry["word"] for own in report["words"].values() for entry in own)
    notes = _notes(report, search)
    tables = list(_code_tables(report))
    shown = {
        "search": True,
        "sizes": True,
        "codes": coded,
        "distances": "distances" in figures,
        "changes": report["changes"],
        "neighbours": words,
        "words": tables,
        "training": "curves" in figures,
        "notes": notes,
    }
    titles = {
        "codes": "Use of codes",
        "distances": "Distance of queries to their centroids",
        "changes": "Codes that changed",
        "neighbours": "Nearest neighbours",
        "words": "Codes of words",
    }
    return environment.get_template("page.html").render(
        report=report,
        search=search,
        figures=figures,
        title=title,
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        policy=_policy(script),
        data=_data({**search, "reference": report["reference"]}),
        sections=[(key, titles.get(key, key.capitalize())) for key, yes in shown.items() if yes],
        tiles=_tiles(report),
        chips=[(word, quote(printable(word), safe="")) for word in words],
        rows={
            "tables": _table_rows(report),
            "models": _model_rows(report),
            "codes": _code_rows(coded),
            "distances": _distance_rows(coded),
            "changes": _change_rows(report),
            "curves": _curve_rows(report),
        },
        code_figures=[(_name(m, t), f"codes {m['name']} {t['path']}") for m, t in coded],
        sets=[(_name(m, t), group) for m, t in coded for group in t["shared"]["largest_sets"][:3]],
        several=len([path for path, own in report["words"].items() if own]) > 1,
        overlap=_mean_overlap(report),
        code_tables=tables,
        limit=_GROUPS,
        notes=notes,
    )


def _text(value: Any) -> Any:
    return value if isinstance(value, Markup) else "" if value is None else printable(value)


def _data(value: Any) -> Markup:
    """Data for the page's script. Without `<` no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _policy(script: str) -> str:
    """Only this script runs, whatever a dictionary holds."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    allowed = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"{allowed}; script-src 'sha256-{digest}'"


def _tiles(report: dict[str, Any]) -> list[dict[str, str]]:
    tiles = []
    for number, model in enumerate(report["models"]):
        sizes = model["sizes"]
        if model["tables"]:
            small = sizes.get("compact_embedding_bytes", sizes["embedding_bytes"])
            ratio = sizes["full_embedding_bytes"] / small if small else 1
            text = "full table" if model["kind"] == "full" else f"{ratio:.1f} times smaller"
            color = style.LIGHT.series[number % len(style.LIGHT.series)]
            tile = {"name": model["name"], "size": human(small), "text": text, "color": color}
            tiles.append(tile)
    return tiles


def _number(value: Any, form: str = ",") -> str:
    return "–" if value is None else format(value, form)


def _name(model: dict[str, Any], table: dict[str, Any]) -> str:
    return f"{model['name']}: {table['path']}"


def _table_rows(report: dict[str, Any]) -> Rows:
    rows = [["", "table", "options", "float32", "stored", "compact", "CR formula", "CR measured"]]
    for model in report["models"]:
        for own in model["tables"]:
            of = own["sizes"]
            shape = f"{own['num_embeddings']:,} × {own['embedding_dim']:,}"
            sizes = [_number(of.get(f"{key}_bytes")) for key in ("full", "stored", "compact")]
            ratios = [_number(of.get(f"{key}_cr"), ".2f") for key in ("formula", "measured")]
            rows.append([_name(model, own), shape, of["description"], *sizes, *ratios])
    return rows


def _model_rows(report: dict[str, Any]) -> Rows:
    rows = [["", "model", "with compact tables", "optimiser", "file", "compact file"]]
    for model in report["models"]:
        of = model["sizes"]
        keys = ("model", "compact_model", "optimizer", "file", "compact_file")
        sizes = [_number(of.get(f"{key}_bytes") or None) for key in keys]
        rows.append([f"{model['name']} ({model['kind']})", *sizes])
    return rows


def _code_rows(coded: list[Any]) -> Rows:
    head = ["", "K", "D", "codes in use", "entropy, bits/symbol", "of"]
    rows: Rows = [[*head, "symbols with the codes of another"]]
    for model, own in coded:
        use, shared = own["use"], own["shared"]
        share = shared["sharing"] / max(shared["symbols"], 1)
        bits = [f"{use[f'{key}_bits_per_symbol']:.1f}" for key in ("entropy", "possible")]
        same = f"{shared['sharing']:,} of {shared['symbols']:,} ({100 * share:.2f} %)"
        used = f"{100 * use['used_share']:.1f} %"
        rows.append([_name(model, own), own["K"], own["D"], used, *bits, same])
    return rows


def _distance_rows(coded: list[Any]) -> Rows:
    rows = [["", "median", "mean", "90 %", "mean distance", "mean cosine"]]
    for model, own in coded:
        far = own.get("distances")
        if far and far["measured"]:
            near = [f"{far['relative'][key]:.3f}" for key in ("median", "mean", "p90")]
            means = [f"{far['distance']['mean']:.4g}", f"{far['cosine']['mean']:.3f}"]
            rows.append([_name(model, own), *near, *means])
    return rows


def _change_rows(report: dict[str, Any]) -> Rows:
    rows = [["from", "to", "table", "codes", "code bits", "symbols with a new code"]]
    for change in report["changes"]:
        shares = [f"{100 * change[key]:.2f} %" for key in ("codes", "bits", "symbols")]
        rows.append([*(change[key] for key in ("from", "to", "table")), *shares])
    return rows


def _curve_rows(report: dict[str, Any]) -> Rows:
    rows = [["", "updates", "valid loss", "valid perplexity", "entropy", "codes changed"]]
    for name, own in report["curves"].items():
        ends = {key: points[-1] for key, points in own.items()}
        updates = max(point[0] for point in ends.values())
        keys = ("loss", "ppl", "dpq_entropy")
        values = [_number(ends.get(f"valid {key}", (0, None))[1], ".4g") for key in keys]
        changed = ends.get("valid dpq_changed", (0, None))[1]
        last = "–" if changed is None else f"{100 * changed:.2f} %"
        rows.append([name, f"{updates:,}", *values, last])
    return rows


def _mean_overlap(report: dict[str, Any]) -> str:
    shares: dict[str, list[float]] = {}
    for words in report["words"].values():
        for entry in words:
            for name, facts in entry["models"].items():
                if facts.get("overlap") is not None:
                    shares.setdefault(name, []).append(facts["overlap"])
    means = [f"{name} {100 * sum(s) / len(s):.0f} %" for name, s in shares.items()]
    return f" Mean overlap: {', '.join(means)}." if means else ""


def _code_tables(report: dict[str, Any]) -> Any:
    """Of each model with codes: its name, its groups, and the words with their codes and hues."""
    for path, words in report["words"].items():
        names = dict.fromkeys(
            n for e in words for n, facts in e["models"].items() if "codes" in facts
        )
        for name in names:
            own = [(e["word"], e["models"][name]["codes"]) for e in words if name in e["models"]]
            largest = max(max(codes) for _, codes in own) + 1
            cells = [(w, [(c, round(360 * c / largest)) for c in codes]) for w, codes in own]
            title = f"{name}: {path}" if len(report["words"]) > 1 else name
            yield title, len(own[0][1]), cells


def _notes(report: dict[str, Any], search: dict[str, Any]) -> list[str]:
    notes = list(report["notes"])
    for words in search["vocabularies"]:
        if words["rows"] < words["total"]:
            notes.append(
                f"The search holds the first {words['rows']:,} of {words['total']:,} symbols "
                "(fairseq's dictionaries begin with the most frequent). Sizes, use of codes and "
                "the neighbours of chosen words are of the whole table."
            )
    for model in report["models"]:
        for own in model["tables"]:
            far = own.get("distances")
            if far and far["measured"] < far["symbols"]:
                notes.append(
                    f"{model['name']}: distances of queries are of a sample of "
                    f"{far['measured']:,} of {far['symbols']:,} symbols."
                )
    return list(dict.fromkeys(notes))
