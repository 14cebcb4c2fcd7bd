"""The sections of the page, from the numbers of the report."""

from __future__ import annotations

import base64
from typing import Any, Iterator, Tuple

from fairseq_dpq.printable import printable
from fairseq_dpq.report.drawing import Drawn
from fairseq_dpq.report.html import Markup, join, symbol, table, tag

Section = Tuple[str, str, Markup]
_GROUPS = 64  # groups of the code table that are shown


def muted(*text: Any) -> Markup:
    return tag("p", *text, class_="muted")


def picture(drawn: Drawn | None, caption: str) -> Markup | None:
    """A figure as an image of its own: nothing in it can act on the page."""
    if drawn is None:
        return None
    data = base64.b64encode(drawn.svg.encode("utf-8")).decode("ascii")
    image = tag("img", src=f"data:image/svg+xml;base64,{data}", alt=f"{drawn.title}. {caption}")
    return tag("figure", image, tag("figcaption", caption))


def size_section(report: dict[str, Any], figures: dict[str, Drawn]) -> Markup | None:
    """Bytes by table and of the whole file, as stored and compact."""
    rows: list[Any] = [
        ["", "table", "options", "float32", "stored", "compact", "CR formula", "CR measured"]
    ]
    whole: list[Any] = [
        ["", "model", "with compact tables", "optimiser", "file", "compact file"],
    ]
    for model in report["models"]:
        name, sizes = printable(model["name"]), model["sizes"]
        for own in model["tables"]:
            of = own["sizes"]
            rows.append(
                [
                    f"{name}: {printable(own['path'])}",
                    f"{own['num_embeddings']:,} × {own['embedding_dim']:,}",
                    printable(of["description"]),
                    f"{of['full_bytes']:,}",
                    f"{of['stored_bytes']:,}",
                    _number(of.get("compact_bytes")),
                    _number(of.get("formula_cr"), ".2f"),
                    _number(of.get("measured_cr"), ".2f"),
                ]
            )
        whole.append(
            [
                f"{name} ({model['kind']})",
                f"{sizes['model_bytes']:,}",
                _number(sizes.get("compact_model_bytes")),
                _number(sizes["optimizer_bytes"] or None),
                f"{sizes['file_bytes']:,}",
                _number(sizes.get("compact_file_bytes")),
            ]
        )
    caption = (
        "Bytes of each model, with its tables in compact form where it has DPQ. The file of a "
        "training checkpoint also holds optimiser state."
    )
    return join(
        [
            picture(figures.get("sizes"), caption),
            tag("h3", "Tables, in bytes"),
            table(rows) if len(rows) > 1 else muted("No token embedding found."),
            tag("h3", "Whole models, in bytes"),
            table(whole),
        ]
    )


def _number(value: Any, form: str = ",") -> str:
    return "–" if value is None else format(value, form)


def code_sections(report: dict[str, Any], figures: dict[str, Drawn]) -> Iterator[Section]:
    """Use of codes, symbols with the same codes, distances, change."""
    coded = [(m, t) for m in report["models"] for t in m["tables"] if "use" in t]
    if not coded:
        return
    rows: list[Any] = [
        [
            "",
            "K",
            "D",
            "codes in use",
            "entropy, bits/symbol",
            "of",
            "symbols with the codes of another",
        ]
    ]
    pictures, sets = [], []
    for model, own in coded:
        use, shared = own["use"], own["shared"]
        name = f"{printable(model['name'])}: {printable(own['path'])}"
        share = shared["sharing"] / max(shared["symbols"], 1)
        rows.append(
            [
                name,
                own["K"],
                own["D"],
                f"{100 * use['used_share']:.1f} %",
                f"{use['entropy_bits_per_symbol']:.1f}",
                f"{use['possible_bits_per_symbol']:.1f}",
                f"{shared['sharing']:,} of {shared['symbols']:,} ({100 * share:.2f} %)",
            ]
        )
        caption = (
            "Each row is a group, each column a code; the colour is the share of symbols that have "
            "the code. Right: entropy of each group; the axis ends at log2 K."
        )
        pictures += [
            tag("h3", name),
            picture(figures.get(f"codes {model['name']} {own['path']}"), caption),
        ]
        for group in shared["largest_sets"][:3]:
            more = ", …" if group["size"] > len(group["symbols"]) else ""
            listed = _commas([symbol(text, "word") for text in group["symbols"]])
            sets.append(muted(f"{name}, {group['size']:,} symbols: ", listed, more))
    largest = [tag("h3", "Largest sets of symbols with the same codes"), *sets] if sets else []
    yield "codes", "Use of codes", join([table(rows), *pictures, *largest])
    if "distances" in figures:
        yield "distances", "Distance of queries to their centroids", _distances(coded, figures)
    if report["changes"]:
        yield "changes", "Codes that changed", _changes(report, figures)


def _commas(items: list[Markup]) -> Markup:
    return join(part for at, item in enumerate(items) for part in ([", ", item] if at else [item]))


def _distances(coded: list[Any], figures: dict[str, Drawn]) -> Markup:
    rows: list[Any] = [["", "median", "mean", "90 %", "mean distance", "mean cosine"]]
    for model, own in coded:
        far = own.get("distances")
        if far and far["measured"]:
            near = far["relative"]
            rows.append(
                [
                    f"{printable(model['name'])}: {printable(own['path'])}",
                    *(f"{near[key]:.3f}" for key in ("median", "mean", "p90")),
                    f"{far['distance']['mean']:.4g}",
                    f"{far['cosine']['mean']:.3f}",
                ]
            )
    caption = (
        "Distance of a symbol's query to the centroids (keys) of its codes, over the query's "
        "length: 0 is on the centroids."
    )
    return join([picture(figures.get("distances"), caption), table(rows)])


def _changes(report: dict[str, Any], figures: dict[str, Drawn]) -> Markup:
    rows: list[Any] = [["from", "to", "table", "codes", "code bits", "symbols with a new code"]]
    for change in report["changes"]:
        shares = [f"{100 * change[key]:.2f} %" for key in ("codes", "bits", "symbols")]
        ends = [printable(change[key]) for key in ("from", "to", "table")]
        rows.append([*ends, *shares])
    caption = "Share of codes, and of symbols with a new code, since the checkpoint before."
    return join([picture(figures.get("changes"), caption), table(rows)])


def word_sections(report: dict[str, Any]) -> Iterator[Section]:
    """Neighbours and codes of the chosen words."""
    near: list[Markup] = []
    codes: list[Markup] = []
    several = len([path for path, words in report["words"].items() if words]) > 1
    for path, words in report["words"].items():
        if several and words:
            near.append(tag("h3", printable(path)))
        near += [_neighbours(entry, report["reference"]) for entry in words]
        codes += _code_tables(path, words, several)
    if near:
        text = "Cosine in the table as the model uses it; the word itself is left out."
        if report["reference"] is not None:
            text += f" ● marks neighbours that {printable(report['reference'])} has too."
            text += _mean_overlap(report)
        yield "neighbours", "Nearest neighbours", join([muted(text), *near])
    if codes:
        text = "The code of each group; equal codes have equal colours."
        yield "words", "Codes of words", join([muted(text), *codes])


def _mean_overlap(report: dict[str, Any]) -> str:
    shares: dict[str, list[float]] = {}
    for words in report["words"].values():
        for entry in words:
            for name, facts in entry["models"].items():
                if facts.get("overlap") is not None:
                    shares.setdefault(name, []).append(facts["overlap"])
    means = [f"{printable(name)} {100 * sum(s) / len(s):.0f} %" for name, s in shares.items()]
    return f" Mean overlap: {', '.join(means)}." if means else ""


def _neighbours(entry: dict[str, Any], reference: str | None) -> Markup:
    models = entry["models"]
    wanted = {n["symbol"] for n in models.get(reference, {"neighbours": []})["neighbours"]}
    cards = []
    for name, facts in models.items():
        lines = []
        for other in facts["neighbours"]:
            also = "also" if name != reference and other["symbol"] in wanted else None
            share = max(0.0, min(1.0, other["cosine"]))
            line = [symbol(other["symbol"], also), tag("span", f"{other['cosine']:.3f}")]
            lines.append(tag("li", *line, style=f"--share: {share:.3f}"))
        overlap = facts.get("overlap")
        text = "" if overlap is None else f" – {100 * overlap:.0f} % overlap"
        head = tag("h4", printable(name), text)
        cards.append(tag("div", head, tag("ol", *lines, class_="near")))
    title = tag("h3", symbol(entry["word"], "word"))
    return tag("div", title, tag("div", *cards, class_="cards lists"), class_="block")


def _code_tables(path: str, words: list[dict[str, Any]], several: bool) -> Iterator[Markup]:
    names = dict.fromkeys(
        name for entry in words for name, facts in entry["models"].items() if "codes" in facts
    )
    for name in names:
        own = [(e["word"], e["models"][name]["codes"]) for e in words if name in e["models"]]
        groups = len(own[0][1])
        largest = max(max(codes) for _, codes in own) + 1
        head = ["", *range(min(groups, _GROUPS))]
        rows = []
        for word, codes in own:
            cells = [
                tag("td", code, class_="code", style=f"--hue: {round(360 * code / largest)}")
                for code in codes[:_GROUPS]
            ]
            rows.append([symbol(word, "word"), *cells])
        title = f"{printable(name)}: {printable(path)}" if several else printable(name)
        more = muted(f"The first {_GROUPS} of {groups} groups; report.json has all.")
        yield join([tag("h3", title), table([head, *rows], "grid")])
        if groups > _GROUPS:
            yield more


def curve_section(report: dict[str, Any], figures: dict[str, Drawn]) -> Markup | None:
    """Curves of training logs."""
    if "curves" not in figures:
        return None
    last: list[Any] = [
        ["", "updates", "valid loss", "valid perplexity", "entropy", "codes changed"]
    ]
    for name, own in report["curves"].items():
        ends = {key: points[-1] for key, points in own.items()}
        updates = max(point[0] for point in ends.values())
        values = [ends.get(f"valid {key}", (0, None))[1] for key in ("loss", "ppl", "dpq_entropy")]
        changed = ends.get("valid dpq_changed", (0, None))[1]
        changed_text = "–" if changed is None else f"{100 * changed:.2f} %"
        shown = [_number(value, ".4g") for value in values]
        last.append([printable(name), f"{updates:,}", *shown, changed_text])
    caption = "Lines: training; with markers or strong: validation."
    return join([picture(figures["curves"], caption), table(last)])
