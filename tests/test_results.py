"""Pages and data: a number on a page that the results do not have is an error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.results import (
    ASIDES,
    PAGE,
    disagreements,
    load,
    markdown,
    rows_of,
    unknown,
    unmarked,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = load()
PAGES = sorted({page for data in RESULTS.values() for page in data["pages"]})
WITH_NUMBERS = sorted({*PAGES, *(row["page"] for row in rows_of(ASIDES))})


def test_results_page_is_the_one_of_the_data() -> None:
    """`python -m experiments.results` writes it."""
    assert PAGE.read_text(encoding="utf-8") == markdown(RESULTS)


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_the_pages_agree_with_the_data(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert disagreements(page, text, RESULTS) == []
    for name, data in RESULTS.items():
        if page in data["pages"]:
            assert f"<!-- results: {name}" in text or f" {name} " in text, f"{page}: {name}"


@pytest.mark.parametrize("page", WITH_NUMBERS)
def test_numbers_in_the_text_are_in_the_data(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert unknown(page, text, RESULTS) == []
    assert unknown(page, text + "\nIt was 4711.5 then, `4711.6` too.\n", RESULTS) == ["4711.5"]


def test_the_demo_of_the_readme_is_the_one_of_the_data() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n *model +BLEU.*?\n(.*?)```", text, re.S)
    shown = dict(re.findall(r"^ *(full table|DPQ-\w+) +(\S+)", block, re.M))
    rows = [row for row in RESULTS["demo"]["rows"] if row["table"] == "source"]
    first = {row["model"]: f"{row['test'][0]}" for row in rows if len(row["seeds"]) == 3}
    assert shown == first and len(first) == 3


def test_every_table_of_numbers_says_where_they_are_from() -> None:
    """options.md is made from the code, results.md from the data; benchmarks have a page."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
    for page in pages:
        if page.name not in ("options.md", "results.md"):
            assert unmarked(page.read_text(encoding="utf-8")) == [], page
    table = "\n| model | BLEU |\n|---|---|\n| full | 38.1 |\n"
    assert unmarked(table) == ["| model | BLEU |"]
    assert unmarked("\n<!-- paper -->" + table) == unmarked(table.replace("38.1", "38")) == []


def test_the_sweep_of_the_page_is_the_one_of_the_file() -> None:
    file = ROOT / "docs" / "figures" / "sweep-demo" / "results.jsonl"
    runs = {(run["method"], run["K"], run["D"]): run for run in map(json.loads, file.open())}
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- sweep -->\n((?:\|.*\n)+)", text)
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for size, size_bytes, sx, vq in (cells[:4], cells[4:]):
            K, D = map(int, size.split(", "))
            for method, perplexity in (("sx", sx), ("vq", vq)):
                run = runs[method, K, D]
                assert abs(run["scores"]["ppl"] - float(perplexity)) < 0.0501, (method, size)
                assert f"{run['bytes']:,}" == size_bytes, (method, size)


def test_a_changed_number_is_found() -> None:
    text = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    for old, new in (("72.6, 73.4", "73.6, 73.4"), ("| 37.63 |", "| 38.63 |"), ("185.9", "184.9")):
        assert old in text
        assert len(disagreements("x", text.replace(old, new), RESULTS)) == 1, old


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_says_where_it_is_from(name: str) -> None:
    data = RESULTS[name]
    for key in ("title", "metric", "date", "machine", "commit", "command", "note", "rows"):
        assert data[key], key
    assert all((ROOT / page).exists() for page in [*data["pages"], *data.get("quoted", [])])
    for row in data["rows"]:
        assert row["model"] and row["data"] and row["seeds"]
        assert row.keys() & {"valid", "valid_ppl", "test"}
