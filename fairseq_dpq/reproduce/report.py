"""A table of the paper with our figures beside its own, as JSON and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.reproduce.planning import Planned
from fairseq_dpq.reproduce.rows import FIGURES


def figure(metric: str, text: str) -> float | None:
    """The last figure of a metric in the output of score.sh."""
    found = FIGURES[metric].findall(text)
    return float(found[-1]) if found else None


def ratios(text: str) -> tuple[float, float]:
    """Compression ratios, by the formula and measured, over all tables of a checkpoint."""
    facts = json.loads(text[text.index("{") :])["embeddings"]
    full, formula, measured = (
        sum(row[name] for row in facts) for name in ("full_bytes", "formula_bytes", "compact_bytes")
    )
    return full / formula, full / measured


def result(item: Planned) -> dict[str, Any]:
    """The figures of a row whose steps are done."""
    log, sizes = item.folder / "score.log", item.folder / "compact.json"
    formula, measured = ratios(sizes.read_text()) if sizes.exists() else (1.0, 1.0)
    return {
        "score": figure(item.metric, log.read_text()),
        "ratio_formula": formula,
        "ratio_measured": measured,
        "commands": [str(step) for step in item.steps],
    }


def facts(item: Planned, found: dict[str, Any] | None) -> dict[str, Any]:
    """One row for the JSON file: the paper's figures and ours, null where there are none yet."""
    row, own = item.row, found or {}
    return {
        "name": item.name,
        "recipe": item.recipe,
        "method": row.label,
        "metric": item.metric,
        "paper": row.paper,
        "paper_ratio": row.paper_ratio,
        "paper_recipe": row.recipe,
        **{key: own.get(key) for key in ("score", "ratio_formula", "ratio_measured")},
    }


def markdown(title: str, scale: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown."""
    head = "| recipe | method | metric | paper | CR, paper | here | CR formula | CR measured |"
    lines = [
        f"# {title}",
        "",
        f"Scale: {scale}.",
        "",
        head,
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        numbers = [_number(row["paper"]), _number(row["paper_ratio"]), _number(row["score"], 2)]
        numbers += [_number(row["ratio_formula"]), _number(row["ratio_measured"])]
        words = [row["recipe"], row["method"], row["metric"], *numbers]
        lines.append("| " + " | ".join(words) + " |")
    others = {row["recipe"]: row["paper_recipe"] for row in rows}
    for recipe, paper in others.items():
        if recipe != paper:
            lines += ["", f"The paper's figures beside {recipe} are those of {paper}."]
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def write(out: Path, name: str, title: str, scale: str, rows: Sequence[dict[str, Any]]) -> None:
    """NAME.md and NAME.json in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    data = {"table": name, "title": title, "scale": scale, "rows": list(rows)}
    (out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(markdown(title, scale, rows), encoding="utf-8")
