"""report.html: one file with style, script, figures and data in it. It fetches nothing."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from fairseq_dpq.figures import style
from fairseq_dpq.printable import printable
from fairseq_dpq.report.drawing import Drawn, human
from fairseq_dpq.report.html import Markup, join, json_script, symbol, tag
from fairseq_dpq.report.sections import code_sections, curve_section, size_section, word_sections

_HERE = Path(__file__).parent


def render_page(
    report: dict[str, Any], search: dict[str, Any], figures: dict[str, Drawn], title: str
) -> str:
    """The whole page as text."""
    css = (_HERE / "page.css").read_text(encoding="utf-8")
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    sections = [
        ("search", "Search", _search(report, search)),
        ("sizes", "Sizes", size_section(report, figures)),
        *code_sections(report, figures),
        *word_sections(report),
        ("training", "Training", curve_section(report, figures)),
        ("notes", "Notes", _notes(report, search)),
    ]
    shown = [(key, name, content) for key, name, content in sections if content is not None]
    links = [tag("a", name, href=f"#{key}") for key, name, _ in shown]
    names = " · ".join(printable(model["name"]) for model in report["models"])
    body = join(
        [
            tag(
                "header",
                tag("div", tag("h1", title), tag("div", names, class_="muted"), tag("nav", *links)),
            ),
            tag(
                "main",
                _tiles(report),
                *(tag("section", tag("h2", name), content, id=key) for key, name, content in shown),
            ),
            tag(
                "footer",
                f"Written by {report['written_by']}. This page fetches nothing: it opens anywhere.",
                class_="muted",
            ),
            json_script("search-data", {**search, "reference": report["reference"]}),
            Markup(f"<script>{script}</script>"),
        ]
    )
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
            tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
            tag("title", title),
            Markup(f"<style>{css}</style>"),
        ]
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _policy(script: str) -> str:
    """Only this script runs, whatever a dictionary holds."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    allowed = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"{allowed}; script-src 'sha256-{digest}'"


def _tiles(report: dict[str, Any]) -> Markup | None:
    tiles = []
    for number, model in enumerate(report["models"]):
        sizes = model["sizes"]
        if not model["tables"]:
            continue
        small = sizes.get("compact_embedding_bytes", sizes["embedding_bytes"])
        ratio = sizes["full_embedding_bytes"] / small if small else 1
        color = style.LIGHT.series[number % len(style.LIGHT.series)]
        text = "full table" if model["kind"] == "full" else f"{ratio:.1f} times smaller"
        tiles.append(
            tag(
                "div",
                tag("div", printable(model["name"]), class_="name"),
                tag("strong", human(small)),
                tag("div", f"embeddings, {text}", class_="muted"),
                class_="tile",
                style=f"--own: {color}",
            )
        )
    return tag("div", *tiles, class_="tiles") if tiles else None


def _search(report: dict[str, Any], search: dict[str, Any]) -> Markup | None:
    if not search["tables"]:
        # The script looks for its elements.
        return tag(
            "p",
            "No table to search.",
            tag("input", id="word", hidden="", type="hidden"),
            tag("ul", id="suggestions", hidden=""),
            tag("div", id="results"),
        )
    chooser = None
    if len(search["tables"]) > 1:
        options = [tag("option", printable(entry["path"])) for entry in search["tables"]]
        chooser = tag("select", *options, id="table", aria_label="table")
    hint = (
        "type a word" if any(v["symbols"] for v in search["vocabularies"]) else "type a row number"
    )
    words = dict.fromkeys(entry["word"] for own in report["words"].values() for entry in own)
    chips = [tag("a", symbol(word), href="#word=" + _quoted(word)) for word in words]
    return join(
        [
            tag(
                "p",
                "A word's codes, its nearest neighbours in the reconstructed table, and the words "
                "that share most codes with it.",
                class_="muted",
            ),
            tag(
                "div",
                tag(
                    "div",
                    tag(
                        "input",
                        id="word",
                        type="search",
                        placeholder=hint,
                        autocomplete="off",
                        spellcheck="false",
                        role="combobox",
                        aria_expanded="false",
                        aria_controls="suggestions",
                        aria_label="word",
                        dir="auto",
                    ),
                    tag("ul", id="suggestions", role="listbox", hidden=""),
                    class_="field",
                ),
                chooser,
                class_="search",
            ),
            tag("div", "Try ", *chips, class_="chips") if chips else None,
            tag("div", id="results", aria_live="polite"),
        ]
    )


def _quoted(word: str) -> str:
    from urllib.parse import quote

    return quote(printable(word), safe="")


def _notes(report: dict[str, Any], search: dict[str, Any]) -> Markup | None:
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
    return (
        join(tag("div", printable(note), class_="note") for note in dict.fromkeys(notes))
        if notes
        else None
    )
