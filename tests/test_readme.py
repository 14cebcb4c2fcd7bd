"""README.md: its Python snippets run and print what it says, and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def snippets() -> list[tuple[str, str]]:
    """Each python block with the text block of its output."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = []
    for (kind, code), (after, output) in zip(blocks, [*blocks[1:], ("", "")]):
        if kind == "python":
            found.append((code, output if after == "text" else ""))
    return found


def test_there_are_snippets() -> None:
    found = snippets()
    assert len(found) >= 2 and all(output for _, output in found)
    first = [line for line in found[0][0].splitlines() if line]
    assert len(first) <= 10  # a use of the layer in ten lines


@pytest.mark.parametrize("number", range(len(snippets())))
def test_snippets_run_and_print_what_the_readme_says(
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, output = snippets()[number]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"README.md, snippet {number + 1}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == output


def test_files_that_the_readme_names_exist() -> None:
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in re.findall(r"\bmake ([a-z][a-z-]*)", text):
        assert f"\n{name}:" in makefile, name
