"""Results as data: NAME.json holds every number that README or a page shows of a measurement, with
its command, commit, seeds, machine and date. ``python -m experiments.results`` makes
docs/results.md and the pictures from it; tests/test_results.py compares the pages with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any, Iterator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "results.md"
FIGURE = "score_against_size"  # of BLEU against bytes, not of a table
_MARK = re.compile(r"<!-- results: ([\w ]+) -->\n+((?:\|.*\n)+)")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")


_HEAD = """# Results

Numbers that were measured and are shown on a page, made from `experiments/results/*.json` by `python -m experiments.results`.
Ratio is that of the table; *model ratio* of the whole model, where it is known. A row with one seed says little: seeds
spread by more than most differences. *Paper* is the number of Chen, Li and Sun (2020), at their sizes and budgets. What has
not been measured is listed at the end of [quality.md](quality.md)."""  # noqa: E501


def load() -> dict[str, dict[str, Any]]:
    """All results, by name."""
    files = sorted(path for path in HERE.glob("*.json") if path.stem != FIGURE)
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}


def _listed(value: Any) -> list[float]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _shown(row: dict[str, Any], key: str) -> str:
    """A value as the page has it: one seed, or mean and standard deviation or range."""
    values = _listed(row.get(key))
    if not values:
        return ""
    if len(values) == 1:
        main = "test" if "test" in row else "valid"
        spread = f" ± {row['spread']:g}" if key == main and row.get("spread") else ""
        return f"{values[0]:g}{spread}"
    if len(values) == len(row["seeds"]):
        return f"{mean(values):.2f} ({min(values):g} to {max(values):g})"
    return ", ".join(f"{value:g}" for value in values)


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """docs/results.md."""
    lines = [_HEAD]
    for data in results.values():
        lines += ["", f"## {data['title']}", ""]
        lines.append(
            f"`{data['command']}`; {data['machine']}, {data['date']}, commit {data['commit']}."
        )
        lines += [data["note"], ""]
        many = len({row["data"] for row in data["rows"]}) > 1
        heads = ["model", *(["data"] if many else []), "ratio", "model ratio", "seeds"]
        heads += [f"valid {data['valid_metric']}".strip(), f"test {data['metric']}", "paper"]
        lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for row in data["rows"]:
            label = row["model"] + (f" ({row['table']} table)" if "table" in row else "")
            cells = [label, *([row["data"]] if many else [])]
            cells += [
                "" if row.get(key) is None else f"{row[key]:g}" for key in ("ratio", "model_ratio")
            ]
            seeds = ", ".join(map(str, row["seeds"]))
            cells += [seeds, _shown(row, "valid"), _shown(row, "test"), _shown(row, "paper")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def numbers(value: Any) -> Iterator[str]:
    """Every number of a value as pages write it, with up to two digits less, and means of lists."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
        if value and all(isinstance(item, (int, float)) for item in value):
            yield from numbers(mean(value))
    elif isinstance(value, str):
        yield from _NUMBER.findall(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from {f"{value:,.{digits}f}" for digits in range(5)} | {f"{value:g}"}


def disagreements(page: str, text: str, results: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of marked tables of a page with a number that the data do not have.

    A table is marked by `<!-- results: NAME -->` above it. All numbers of a row must be those of
    one model there; with several names, of any model.
    """
    wrong = []
    for names, table in _MARK.findall(text):
        rows = [row for name in names.split() for row in results[name]["rows"]]
        models = {row["model"] for row in rows} if len(names.split()) == 1 else {None}
        known = [
            {number for row in rows if model in (None, row["model"]) for number in numbers(row)}
            for model in models
        ]
        for line in table.splitlines()[2:]:
            plain = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", line)
            found = {number for number in _NUMBER.findall(plain) if "." in number}
            if not any(found <= own for own in known):
                wrong.append(f"{page}: {line}")
    return wrong
