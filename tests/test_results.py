"""Pages and data: a number on a page that the results do not have is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.results import PAGE, disagreements, load, markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = load()
PAGES = sorted({page for data in RESULTS.values() for page in data["pages"]})


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


def test_a_changed_number_is_found() -> None:
    text = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    for old, new in (("72.6, 73.4", "73.6, 73.4"), ("| 37.63 |", "| 38.63 |"), ("185.9", "184.9")):
        assert old in text
        assert len(disagreements("x", text.replace(old, new), RESULTS)) == 1, old


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_says_where_it_is_from(name: str) -> None:
    data = RESULTS[name]
    for key in ("title", "metric", "date", "machine", "commit", "command", "note", "pages", "rows"):
        assert data[key], key
    for row in data["rows"]:
        assert row["model"] and row["data"] and row["seeds"]
        assert "valid" in row or "test" in row
