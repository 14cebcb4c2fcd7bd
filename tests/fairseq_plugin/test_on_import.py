"""The plugin registers itself when a program imports fairseq, in either order."""

from __future__ import annotations

import sys

import pytest

from helpers import fsq

pytestmark = pytest.mark.slow

CHECK = """
from fairseq.models import build_model
from fairseq.tasks import TASK_REGISTRY
assert "stateful_lm" in TASK_REGISTRY
assert build_model._fairseq_dpq_compat
print("registered")
"""
WITHOUT = """
import sys
import fairseq_dpq
assert "fairseq" not in sys.modules
"""


@pytest.mark.parametrize(
    "imports", ["import fairseq_dpq\nimport fairseq", "import fairseq\nimport fairseq_dpq"]
)
def test_registered_in_either_order(imports: str, tmp_path) -> None:
    done = fsq.run([sys.executable, "-c", imports + CHECK], cwd=tmp_path)
    assert done.stdout == "registered\n"


def test_asking_for_fairseq_does_not_end_the_watch(tmp_path) -> None:
    asked = WITHOUT + "import importlib.util\nassert importlib.util.find_spec('fairseq')\n"
    done = fsq.run([sys.executable, "-c", asked * 2 + "import fairseq\n" + CHECK], cwd=tmp_path)
    assert done.stdout == "registered\n"


def test_fairseq_is_found_as_before(tmp_path) -> None:
    """The package alone imports no fairseq, and leaves no trace on its module."""
    script = WITHOUT + (
        "import fairseq\n"
        "print(fairseq.__spec__.loader is fairseq.__loader__, type(fairseq.__loader__).__name__)\n"
        "print([f for f in sys.meta_path if getattr(f, 'awaited', None) == 'fairseq'])\n"
    )
    done = fsq.run([sys.executable, "-c", script], cwd=tmp_path)
    assert done.stdout == "True SourceFileLoader\n[]\n"
