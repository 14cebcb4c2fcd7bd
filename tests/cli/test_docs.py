"""docs/compact-format.md: its Python blocks run as they stand there, in a folder with the files
that they name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fairseq_dpq.cli import compact, export
from helpers import fsq
from helpers.tool_runs import TF, train

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compact-format.md"


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory) -> Path:
    """A model, its data and an exported table, under the names of the page."""
    root = tmp_path_factory.mktemp("page")
    flags = f"{TF} --share-decoder-input-output-embed --dpq-K 8 --dpq-D 8 --dpq-embeddings all"
    path = train(corpus, root / "checkpoints", flags)
    small = path.with_name("compact.pt")
    assert compact.main([str(path), str(small)]) == 0
    table = ["--table", "encoder.embed_tokens"]
    assert export.main([str(small), str(root / "table.safetensors"), *table]) == 0
    (root / "data-bin").symlink_to(corpus)
    return root


def _blocks() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_blocks_run(folder, monkeypatch) -> None:
    load, table = _blocks()
    done = fsq.run([sys.executable, "-c", load], cwd=folder)
    words = done.stdout.split()
    assert words and all(re.fullmatch(r"b\d+|<unk>", word) for word in words)
    names: dict = {}
    monkeypatch.chdir(folder)
    exec(table, names)
    assert tuple(names["vectors"].shape) == (3, 32) and names["vectors"].any()
    assert names["symbols"][:5] == ["<s>", "<pad>", "</s>", "<unk>", "a0"]


def test_the_import_is_needed(folder) -> None:
    """And what torch says without it is what the page says."""
    load = _blocks()[0]
    first, _, rest = load.partition("\n")
    assert first.startswith("import fairseq_dpq ")
    done = fsq.run([sys.executable, "-c", rest], cwd=folder, ok=not fsq.torch_at_least(2, 6))
    (name,) = re.findall(r"`(fairseq_dpq\.marker\.\w+)`", PAGE.read_text(encoding="utf-8"))
    assert name in done.stderr or done.returncode == 0
