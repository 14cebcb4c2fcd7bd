"""A package outside this one that adds to it, as a third party would write and install it: the
examples of CONTRIBUTING.md."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def example(heading: str) -> str:
    """The Python code under a heading of CONTRIBUTING.md."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return page.split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]


METHOD = example("Add a method")
FORM = example("Add a form")


def install(folder: Path, **modules: str) -> dict[str, str]:
    """Write `toy_dpq` with these modules as pip would install it; the environment that finds it."""
    package, info = folder / "toy_dpq", folder / "toy_dpq-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    for name, source in modules.items():
        (package / f"{name}.py").write_text(source)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-dpq\nVersion: 1.0\n")
    lines = [f"{name} = toy_dpq.{name}" for name in modules]
    (info / "entry_points.txt").write_text("\n".join(["[fairseq_dpq]", *lines]) + "\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
