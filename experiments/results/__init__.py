"""Results as data: NAME.json holds every number that README or a page shows of a measurement, with
its command, commit, seeds, machine and date. ``python -m experiments.results`` makes
docs/results.md and the pictures from it; tests/test_results.py compares the pages with it."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import subprocess
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any, Iterator

from fairseq_dpq.runs.folder import RunsError, write_whole

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "results.md"
NOT_RUN, ASIDES = "not_run", "asides"  # what was not run; numbers in the text of the pages
PROVENANCE = ("date", "machine", "commit")
_MARK = re.compile(r"<!-- results: ([\w ]+) -->\n+((?:\|.*\n)+)")
_KINDS = r"results: [\w ]+|paper|settings|sizes|sweep|timings"
_TABLE = re.compile(rf"(<!-- (?:{_KINDS}) -->)?\n(\|.*\n\|-.*\n(?:\|.*\n)*)")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w|\.\d)")


_HEAD = """# Results

All measured numbers that appear on the pages, generated from `experiments/results/*.json` by `python -m experiments.results`.
A ratio is how many times smaller the table is; *model ratio* is that of the whole model, by the bytes of its tensors. Where a row has
several seeds, it shows their mean with the range or the standard deviation. A row with one seed says little: seeds spread by more than most
differences. Timings are on the page of the [benchmarks](../benchmarks/README.md)."""  # noqa: E501
_PAPER = """## The rows of the paper

*Paper* is the number of Chen, Li and Sun (2020), of a test set. The tables below have our seeds and settings."""  # noqa: E501
_ASIDES = """## In the text of the pages

Numbers that stand in no table: single measurements, differences, settings. The page says how they
were measured."""
_NOT_RUN = """## Not run

The recipes are there, and `scripts/reproduce.sh TABLE` runs the rows of a table of the paper."""


def load() -> dict[str, dict[str, Any]]:
    """All results by name, in the order of the page."""
    files = [path for path in HERE.glob("*.json") if path.stem not in (NOT_RUN, ASIDES)]
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}
    return dict(sorted(found.items(), key=lambda item: (item[1]["place"], item[0])))


def provenance() -> dict[str, str]:
    """Date, machine and commit of what is measured now."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = ""
    with contextlib.suppress(OSError):  # a machine without git
        commit = subprocess.run(git, cwd=ROOT, text=True, capture_output=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    names = re.findall("^model name\\s*: (.+)", info.read_text() if info.exists() else "", re.M)
    machine = names[0] if names else platform.processor() or platform.machine()
    return {"date": f"{date.today()}", "machine": machine, "commit": commit or "unknown"}


def recorded(name: str, command: str) -> dict[str, Any] | None:
    """What `record` wrote to NAME.json before, if it did; RunsError for results of another kind:
    the page shows one command for all rows of a file."""
    path = HERE / f"{name}.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if data is not None and not (isinstance(data, dict) and data.get("recorded")):
        raise RunsError(f"--record {name}: {path} holds other results; choose another name")
    if data is not None and data["command"] != command:
        raise RunsError(
            f"--record {name}: {path} has the results of '{data['command']}'; choose another name "
            f"for those of '{command}'"
        )
    return data


def record(name: str, head: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write rows to NAME.json, in place of those of the same model and data, and then the page. A
    new file takes title, metric and command from `head`; date, machine and commit are those of the
    last row."""
    path = HERE / f"{name}.json"
    data = recorded(name, head["command"]) or {"recorded": True, "place": 50, "pages": [], **head}
    new = {(row["model"], row["data"]): row for row in rows}
    kept = [row for row in data.get("rows", []) if (row["model"], row["data"]) not in new]
    data.update({key: rows[-1][key] for key in PROVENANCE}, rows=[*kept, *new.values()])
    write_whole(path, json.dumps(data, indent=1) + "\n")
    write_whole(PAGE, markdown(load()))
    return path


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of NOT_RUN or ASIDES."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


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
        digits = max(2, *(len(str(value).partition(".")[2]) for value in values))
        return f"{mean(values):.{digits}f} ({min(values):g} to {max(values):g})"
    return ", ".join(f"{value:g}" for value in values)


def _label(row: dict[str, Any]) -> str:
    return row["model"] + (f" ({row['table']} table)" if "table" in row else "")


def _table(columns: dict[str, list[str]]) -> list[str]:
    """A table without the columns that are empty."""
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in zip(*columns.values()))]


def _of_the_paper(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = [(data, row) for data in results.values() for row in data["rows"] if "paper" in row]
    subset = ["test" if "test" in row else "valid" for _, row in rows]
    return _table(
        {
            "row": [row.get("paper_row", data["title"]) for data, row in rows],
            "model here": [_label(row) for _, row in rows],
            "metric": [data["metric"] for data, _ in rows],
            "paper": [f"{row['paper']:g}" for _, row in rows],
            "here": [f"{_shown(row, of)} ({of})" for (_, row), of in zip(rows, subset)],
            "ratio, paper": [f"{row.get('paper_ratio') or 1:g}" for _, row in rows],
            "ratio, here": [f"{row['ratio']:g}" for _, row in rows],
            "model ratio": [f"{row.get('model_ratio', '')}" for _, row in rows],
        }
    )


def _section(data: dict[str, Any]) -> list[str]:
    rows = data["rows"]
    where = f"`{data['command']}`; {data['machine']}, {data['date']}, commit {data['commit']}."
    ratios = {
        head: ["" if row.get(key) is None else f"{row[key]:g}" for row in rows]
        for head, key in (("ratio", "ratio"), ("model ratio", "model_ratio"))
    }
    sets = [row["data"] for row in rows]
    columns = {
        "model": list(map(_label, rows)),
        "data": sets if len(set(sets)) > 1 else [],
        **ratios,
        "seeds": [", ".join(f"{x}" for x in row["seeds"] if x is not None) for row in rows],
        f"valid {data['valid_metric']}": [_shown(row, "valid") for row in rows],
        "valid ppl": [_shown(row, "valid_ppl") for row in rows],
        f"test {data['metric']}": [_shown(row, "test") for row in rows],
        "note": [row.get("note", "") for row in rows],
    }
    return ["", f"## {data['title']}", "", where, data["note"], "", *_table(columns)]


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """docs/results.md."""
    lines = [_HEAD, "", _PAPER, "", *_of_the_paper(results)]
    for data in results.values():
        lines += _section(data)
    asides = [{**row, "values": ", ".join(map(str, row["values"]))} for row in rows_of(ASIDES)]
    for head, rows, keys in (
        (_ASIDES, asides, ("page", "what", "values")),
        (_NOT_RUN, rows_of(NOT_RUN), ("what", "why")),
    ):
        lines += ["", head, "", *_table({key: [row[key] for row in rows] for key in keys})]
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


def _plain(text: str) -> str:
    return re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", text)


def unmarked(text: str) -> list[str]:
    """First lines of the tables with decimal numbers that do not say where these are from."""
    tables = [table for mark, table in _TABLE.findall(text) if not mark]
    return [t.splitlines()[0] for t in tables if "." in "".join(_NUMBER.findall(_plain(t)))]


def unknown(page: str, text: str, results: dict[str, dict[str, Any]]) -> list[str]:
    """Decimal numbers in the text of a page, outside its tables and code, that neither the results
    it shows nor those it only `quotes` have, nor its asides."""
    mine = [data for data in results.values() if page in [*data["pages"], *data.get("quoted", [])]]
    asides = [row["values"] for row in rows_of(ASIDES) if row["page"] == page]
    known = {number for value in (*mine, asides) for number in numbers(value)}
    prose = re.sub(r"```.*?```|^(?:\||    )[^\n]*", "", text, flags=re.S | re.M)
    return [n for n in _NUMBER.findall(_plain(prose)) if "." in n and n not in known]


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
            found = {number for number in _NUMBER.findall(_plain(line)) if "." in number}
            if not any(found <= own for own in known):
                wrong.append(f"{page}: {line}")
    return wrong
