"""What `pip install fairseq-dpq` alone can do: the layer; tools name the extra that is missing."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from helpers import fsq
from helpers.toy_checkpoints import save_toy

ROOT = Path(__file__).resolve().parent.parent
EXTRA = ("fairseq", "hydra", "omegaconf", "sacrebleu", "sentencepiece", "matplotlib")
TIMED = """
import resource, sys
import fairseq_dpq
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, "fairseq" in sys.modules, "omegaconf" in sys.modules)
"""
LAYER = """
import sys, torch
from fairseq_dpq import CompactEmbedding, DPQEmbedding
assert not any(name in sys.modules for name in ("fairseq", "hydra", "omegaconf"))
layer = DPQEmbedding(50, 8, K=4, D=2).eval()
print(torch.equal(layer.compact()(torch.arange(50)), layer(torch.arange(50))))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, str]:
    """The environment of this interpreter with links to all its packages but those of extras."""
    site = tmp_path_factory.mktemp("bare")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.lower().startswith(
            (*EXTRA, "__editable__", "_virtualenv", "distutils")
        ):
            (site / package.name).symlink_to(package)
    return {"PYTHONPATH": f"{ROOT}:{site}"}


def test_import_takes_less_than_two_seconds_and_no_fairseq(tmp_path) -> None:
    """In an environment that has fairseq; processor time, because others may use the machine."""
    done = fsq.run([sys.executable, "-c", TIMED], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    seconds, fairseq, omegaconf = done.stdout.split()
    assert float(seconds) < 2
    assert (fairseq, omegaconf) == ("False", "False")


def test_the_layer_needs_no_extra(bare, tmp_path) -> None:
    done = fsq.run([sys.executable, "-S", "-c", LAYER], cwd=tmp_path, env=bare)
    assert done.stdout == "True\n"


def test_tools_work_on_files_without_fairseq(bare, tmp_path) -> None:
    """Their pickles name nothing of fairseq; files of other versions may, and need it then."""
    save_toy(tmp_path / "in.pt")
    for module, argv in (
        ("compact", ["in.pt", "out.pt"]),
        ("inspect", ["in.pt", "out.pt"]),
        ("export", ["out.pt", "out.safetensors", "--no-symbols"]),
    ):
        command = [sys.executable, "-S", "-m", f"fairseq_dpq.cli.{module}", *argv]
        done = fsq.run(command, cwd=tmp_path, env=bare)
        assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    ("module", "argv", "prog", "missing"),
    [
        ("export", ["in.pt", "o.safetensors", "--dict", "d.txt"], "fairseq-dpq-export", "fairseq"),
        ("path", ["--link"], "fairseq-dpq-path", "fairseq"),
        ("hydra_train", [], "fairseq-dpq-hydra-train", "fairseq_cli"),
    ],
)
def test_a_tool_names_the_extra_that_is_missing(
    bare, tmp_path, module, argv, prog, missing
) -> None:
    save_toy(tmp_path / "in.pt")
    command = [sys.executable, "-S", "-m", f"fairseq_dpq.cli.{module}", *argv]
    done = fsq.run(command, cwd=tmp_path, env=bare, ok=False)
    assert done.stderr == (
        f"{prog}: error: {missing} is not installed; pip install 'fairseq-dpq[fairseq]' brings it\n"
    )
    assert done.returncode == 2
