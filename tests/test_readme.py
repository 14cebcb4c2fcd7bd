"""README.md: its Python snippets run and print what it says; its table of options is that of the
options' dataclasses. `python tests/test_readme.py` writes the table."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from fairseq_dpq.config import DPQConfig, PluginConfig, flag_fields

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- options: [^\n]* -->\n)(.*?)(<!-- end of options -->)", re.DOTALL)


def snippets() -> list[tuple[str, str]]:
    """Each python block with the text block of its output."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = []
    for (kind, code), (after, output) in zip(blocks, [*blocks[1:], ("", "")]):
        if kind == "python":
            found.append((code, output if after == "text" else ""))
    return found


def options_table() -> str:
    """The table of options, from the fields of the dataclasses."""
    layer = {field.name: field for field in dataclasses.fields(DPQConfig)}
    lines = ["| keyword | flag | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(PluginConfig):
        flag = "`--dpq-" + field.metadata.get("flag", field.name).replace("_", "-") + "`"
        if field not in flag_fields():
            flag = ""
        shown = layer.get(field.name, field)
        keyword = f"`{field.name}`" if field.name in layer else ""
        default = "" if shown.default is None else f"`{shown.default}`"
        meaning = shown.metadata["help"]
        if field.name == "K":
            meaning += "; as a flag 0 by default: DPQ is off"
        elif "flag" in field.metadata:  # its help text is the flag's, which switches it off
            meaning = f"the flag: {meaning}"
        if "choices" in field.metadata:
            meaning = f"one of {', '.join(field.metadata['choices'])}. {meaning}"
        lines.append(f"| {keyword} | {flag} | {default} | {meaning} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


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


def test_options_are_those_of_the_dataclasses() -> None:
    found = TABLE.search(README.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group(2) == options_table(), "run: python tests/test_readme.py"


def test_flags_are_those_of_fairseq_train() -> None:
    options = pytest.importorskip("fairseq_dpq.fairseq_plugin.options")
    table = options_table()
    assert len(options.KEYS) == len(flag_fields())
    for key in options.KEYS:
        assert f"`--{key.replace('_', '-')}`" in table


def test_files_that_the_readme_names_exist() -> None:
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in re.findall(r"\bmake ([a-z][a-z-]*)", text):
        assert f"\n{name}:" in makefile, name


if __name__ == "__main__":
    written = TABLE.sub(
        lambda m: m.group(1) + options_table() + m.group(3), README.read_text(encoding="utf-8")
    )
    README.write_text(written, encoding="utf-8")
