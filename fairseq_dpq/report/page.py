"""The files of a report: numbers, figures and report.html, one file with style, script, figures and
data in it, which fetches nothing.

page.html is its template. Text cannot become markup there: Jinja escapes every expression, and
control characters are shown as escapes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import tempfile
from operator import methodcaller
from pathlib import Path
from typing import Any, Iterator

from jinja2 import Environment, FileSystemLoader, Undefined
from markupsafe import Markup

from fairseq_dpq.figures.style import human, require_matplotlib, series_color
from fairseq_dpq.files.errors import CheckpointError, printable
from fairseq_dpq.files.writer import check_target, write_whole
from fairseq_dpq.report.drawing import draw_figures

PAGE, NUMBERS, FIGURES = "report.html", "report.json", "figures"
_HERE = Path(__file__).parent
_SECTIONS = {
    "search": "Search",
    "sizes": "Sizes",
    "codes": "Use of codes",
    "distances": "Distance of queries to their centroids",
    "changes": "Codes that changed",
    "neighbours": "Nearest neighbours",
    "words": "Codes of words",
    "training": "Training",
    "notes": "Notes",
}


def check_folder(out: Path, inputs: list[Path], force: bool) -> None:
    """Refuse before any work: no matplotlib, a file in the way, a report that is there."""
    require_matplotlib()
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"--out {out} is a file; give a folder")
    if not out.parent.is_dir():
        raise CheckpointError(f"the folder of --out {out} does not exist")
    if out.is_dir():
        for name in (PAGE, NUMBERS):
            check_target(out / name, inputs, force)


def write_report(
    report: dict[str, Any], search: dict[str, Any], out: Path, title: str, force: bool = False
) -> None:
    """Write the report into a folder. Nothing is left behind if it fails midway."""
    made = not out.exists()
    out.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".figures-", dir=out) as work:
            figures = draw_figures(report, Path(work))
            page = render_page(report, search, figures, title)
            (out / FIGURES).mkdir(exist_ok=True)
            for file in sorted(Path(work).iterdir()):
                os.replace(file, out / FIGURES / file.name)
        for name, text in ((NUMBERS, json.dumps(report, indent=1)), (PAGE, page)):
            write_whole(out / name, methodcaller("write", text.encode("utf-8")), force=force)
    except BaseException:
        if made:
            shutil.rmtree(out, ignore_errors=True)
        raise


def render_page(
    report: dict[str, Any], search: dict[str, Any], figures: dict[str, str], title: str
) -> str:
    """The whole page as text."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, finalize=_text
    )
    environment.filters.update(base64=_base64, number=_number, color=series_color, human=human)
    environment.filters["printable"] = printable
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    coded = [(m, t) for m in report["models"] for t in m["tables"] if "use" in t]
    words = dict.fromkeys(entry["word"] for own in report["words"].values() for entry in own)
    notes = _notes(report, search)
    tables = list(_code_tables(report))
    shown = {"search": True, "sizes": True, "codes": coded, "changes": report["changes"]}
    shown.update(neighbours=words, words=tables, notes=notes)
    shown.update(distances="distances" in figures, training="curves" in figures)
    return environment.get_template("page.html").render(
        report=report,
        search=search,
        figures=figures,
        title=title,
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        policy=_policy(script),
        data=_data({**search, "reference": report["reference"]}),
        sections=[(key, name) for key, name in _SECTIONS.items() if shown[key]],
        words=words,
        coded=coded,
        overlap=_mean_overlap(report),
        code_tables=tables,
        notes=notes,
    )


def _text(value: Any) -> Any:
    return value if isinstance(value, Markup) else "" if value is None else printable(value)


def _number(value: Any, form: str = ",") -> str:
    missing = value is None or isinstance(value, Undefined)
    return "–" if missing else format(value, form)


def _data(value: Any) -> Markup:
    """Data for the page's script. Without `<` no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _base64(content: str | bytes) -> str:
    raw = content.encode("utf-8") if isinstance(content, str) else content
    return base64.b64encode(raw).decode("ascii")


def _policy(script: str) -> str:
    """Only this script runs, whatever a dictionary holds."""
    digest = _base64(hashlib.sha256(script.encode("utf-8")).digest())
    allowed = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"{allowed}; script-src 'sha256-{digest}'"


def _mean_overlap(report: dict[str, Any]) -> str:
    shares: dict[str, list[float]] = {}
    for words in report["words"].values():
        for entry in words:
            for name, facts in entry["models"].items():
                if facts.get("overlap") is not None:
                    shares.setdefault(name, []).append(facts["overlap"])
    means = [f"{name} {100 * sum(s) / len(s):.0f} %" for name, s in shares.items()]
    return f" Mean overlap: {', '.join(means)}." if means else ""


def _code_tables(report: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
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
