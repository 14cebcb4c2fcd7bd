"""docs/faq.md: each heading is a message that this package, fairseq, torch or Python prints; and
docs/install.md agrees with setup.py and the workflow."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import fairseq.utils
import pytest
import yaml

from fairseq_dpq.marker import DPQ_checkpoint__add__user_dir_fairseq_dpq as Marker
from fairseq_dpq.sizes import bits_note

unpickler = pytest.importorskip("torch._weights_only_unpickler", reason="torch 1.13 and later")

ROOT = Path(__file__).resolve().parent.parent
FAQ = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(.+)`$", FAQ, re.MULTILINE)


def _messages(*files: Path) -> str:
    """The source of some files with the string literals of a message joined, names as `...`."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    text = re.sub(r'"\s*\+?\s*f?"', "", text)
    return re.sub(r"\{[^{}]*\}", "...", text)


OURS = _messages(*sorted((ROOT / "fairseq_dpq").rglob("*.py")))
THEIRS = _messages(
    Path(fairseq.utils.__file__), Path(unpickler.__file__), Path(argparse.__file__)
).replace("FileNotFoundError(module_path)", "FileNotFoundError: ")
MADE = [
    f"GLOBAL {Marker.__module__}.{Marker.__name__} was not an allowed global",
    "GLOBAL argparse.Namespace was not an allowed global",
    "No module named 'fairseq_dpq'",
    "unrecognized arguments: --dpq-K 32",
    "did you mean --dpq-K?",
    "pip install 'fairseq-dpq[fairseq]' brings it",
    "--dpq-regularizer-weight",
    "has no effect with --dpq-method sx; use --dpq-method vq",
    "Key 'dpq_K' not in",
    bits_note(33),
]


def test_there_are_headings() -> None:
    assert len(HEADINGS) > 15 and len(set(HEADINGS)) == len(HEADINGS)


@pytest.mark.parametrize("heading", HEADINGS)
def test_each_heading_is_a_message(heading: str) -> None:
    parts = [part.strip() for part in heading.split("...") if len(part.strip()) > 4]
    assert parts
    for part in parts:
        found = part in OURS or part in THEIRS or any(made in part for made in MADE)
        assert found or any(part in made for made in MADE), part


def test_the_install_page_and_setup_agree() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (needs,) = re.findall(r"install_requires=\[([^\]]*)\]", setup)
    names = re.findall(r'"(\w+)"', needs)
    assert f"| none | {', '.join(names)} |" in INSTALL
    (extras,) = re.findall(r"extras_require=\{(.*?)\n    \},", setup, re.DOTALL)
    for extra in re.findall(r'^        "(\w+)": \[', extras, re.MULTILINE):
        assert f"| `{extra}` |" in INSTALL
    for pin in re.findall(r"'(fairseq[\w-]*==[\d.]+);", setup):
        assert pin in INSTALL


def test_the_install_page_and_the_workflow_agree() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    versions = workflow["jobs"]["ci"]["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]
    for version in versions:
        assert f"\n| {version} | 2.13" in INSTALL, version
    assert "(which is tested), 3.12 or 3.13" in INSTALL
