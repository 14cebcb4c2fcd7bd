"""docs/options.md is made from the options' declarations: `python tests/test_options_page.py`
writes it."""

from __future__ import annotations

from dataclasses import Field
from pathlib import Path

from fairseq_dpq.config import flag
from fairseq_dpq.fairseq_plugin.options import flag_fields, method_fields, plugin_fields
from fairseq_dpq.methods import METHODS
from fairseq_dpq.methods.base import all_options, takers

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
HEAD = """# Options

`python tests/test_options_page.py` writes this page from the declarations in `fairseq_dpq/methods`.
Keywords are those of `DPQEmbedding`, flags those of `fairseq-train --user-dir fairseq_dpq`. One
that the chosen method does not take, or that has no effect with the others, is an error.

## Methods

`method="sx"`, `--dpq-method sx`. `--dpq-K` (for `low_rank`, `--dpq-rank`) turns DPQ on.

| method | |
|---|---|
"""


def row(f: Field, keyword: bool = True) -> str:
    """A line of the table."""
    given = "" if f.default in (None, "") else f"`{f.default}`"
    owners = takers(f.name)
    name = f"`{f.name}`" if keyword else ""
    named = f"`{flag(f.name)}`" if f.metadata["flag"] else ""
    all_ = len(owners) == len(METHODS)
    cells = [name, named, given, "all" if all_ else ", ".join(owners), f.metadata["help"]]
    return "| " + " | ".join(cells).replace("|  |", "| |") + " |"


def page() -> str:
    out = HEAD + "".join(f"| `{name}` | {m.summary} |\n" for name, m in METHODS.items())
    out += "\n## Options of the methods\n\n| keyword | flag | default | methods | meaning |\n"
    out += "|---|---|---|---|---|\n"
    out += "".join(row(f) + "\n" for f in all_options().values())
    out += "\n## Options of the plugin\n\n| flag | default | meaning |\n|---|---|---|\n"
    for f in plugin_fields()[1:]:
        out += f"| `{flag(f.name)}` | `{f.default}` | {f.metadata['help']} |\n"
    return out


def test_the_page_is_that_of_the_declarations() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/test_options_page.py"


def test_every_flag_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(method_fields()) > 15
    for f in flag_fields():
        assert f"`{flag(f.name)}" in text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
