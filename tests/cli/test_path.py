"""fairseq-dpq-path: the folder of the plugin, and a link where fairseq looks for it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import fairseq
import pytest

from fairseq_dpq.cli import path
from helpers import fsq

FOUND = """
import sys
from argparse import Namespace
sys.path.insert(0, "clone")
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir=sys.argv[1]))
print(sys.modules["fairseq_dpq"].DPQEmbedding.__name__)
"""


def test_prints_the_folder(capsys) -> None:
    assert path.main([]) == 0
    assert os.path.samefile(capsys.readouterr().out.rstrip("\n"), fsq.USER_DIR)


def test_link_is_made_once_and_never_over_another(tmp_path) -> None:
    made = path.link(tmp_path)
    assert made == tmp_path / "fairseq_dpq" and os.path.samefile(made, fsq.USER_DIR)
    assert path.link(tmp_path) == made
    made.unlink()
    made.mkdir()
    with pytest.raises(Exception, match=r"cannot link .*fairseq_dpq to .*File exists; use --user"):
        path.link(tmp_path)


@pytest.mark.slow
def test_with_a_clone_of_fairseq(tmp_path: Path) -> None:
    """A clone has no plugin beside it: not found by name, but by path and, once linked, by name."""
    clone = tmp_path / "clone"
    clone.mkdir()
    package = Path(fairseq.__file__).parent
    shutil.copytree(package, clone / "fairseq", ignore=shutil.ignore_patterns("examples", "*.cpp"))
    env = {"PYTHONPATH": str(Path(fsq.USER_DIR).parent)}
    command = [sys.executable, "-W", "ignore", "-c", FOUND]
    done = fsq.run([*command, "fairseq_dpq"], cwd=tmp_path, env=env, ok=False)
    assert f"FileNotFoundError: {tmp_path}/fairseq_dpq" in done.stderr
    done = fsq.run([*command, fsq.USER_DIR], cwd=tmp_path, env=env)
    assert done.stdout.splitlines()[-1] == "DPQEmbedding"
    link = [sys.executable, "-m", "fairseq_dpq.cli.path", "--link"]
    env["PYTHONPATH"] = os.pathsep.join([str(clone), env["PYTHONPATH"]])
    done = fsq.run(link, cwd=tmp_path, env=env)
    assert done.stdout == f"{clone}/fairseq_dpq\n"
    done = fsq.run([*command, "fairseq_dpq"], cwd=tmp_path, env=env)
    assert done.stdout.splitlines()[-1] == "DPQEmbedding"
