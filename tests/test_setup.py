"""Packaging and set-up: what pip users get, that the pins agree with each other, that fairseq finds
the plugin by name from any directory, and that the set-up script refuses what it cannot use."""

from __future__ import annotations

import configparser
import email
import errno
import fcntl
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import fairseq_dpq

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "scripts" / "setup_env.sh"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel that ``pip install .`` builds, from a copy: the checkout stays clean."""
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "fairseq_dpq", work / "fairseq_dpq", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, work)
    (work / "tests").mkdir()
    (work / "tests" / "__init__.py").touch()
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout.decode()
    (path,) = (work / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def _metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_wheel_holds_the_whole_package_and_nothing_else(wheel) -> None:
    files = {path for path in wheel.namelist() if ".dist-info/" not in path}
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fairseq_dpq").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert {path for path in files if path.endswith(".py")} == sources
    assert all(path.startswith("fairseq_dpq/") for path in files)
    assert "fairseq_dpq/py.typed" in files
    assert {"fairseq_dpq/report/page.css", "fairseq_dpq/report/page.js"} <= files


def test_wheel_asks_for_torch_and_only_the_extra_for_fairseq(wheel) -> None:
    metadata = email.message_from_string(_metadata(wheel, "METADATA"))
    assert metadata["Name"] == "fairseq-dpq"
    assert metadata["Version"] == fairseq_dpq.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist")]

    def wanted(python: str, extra: str = "") -> set[str]:
        environment = {"python_version": python, "extra": extra}
        return {
            f"{requirement.name}{requirement.specifier}"
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate(environment)
        }

    common = {"torch", "numpy", "tqdm", "safetensors", "filelock", "jinja2"}
    assert wanted("3.10") == wanted("3.13") == common
    tools = common | {"sacrebleu>=2", "sentencepiece"}
    old, new = tools | {"fairseq==0.12.2"}, tools | {"fairseq-fixed==0.12.3.1"}
    assert wanted("3.10", "fairseq") == old
    assert wanted("3.11", "fairseq") == wanted("3.13", "fairseq") == new


def test_console_commands_exist(wheel) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(_metadata(wheel, "entry_points.txt"))
    scripts = dict(parser["console_scripts"])
    assert "fairseq-dpq-compact" in scripts
    for name, target in scripts.items():
        assert name.startswith("fairseq-dpq-")
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_fairseq_finds_the_plugin_by_name_from_any_directory(tmp_path: Path) -> None:
    code = (
        "from argparse import Namespace; from fairseq.utils import import_user_module; import sys\n"
        "import_user_module(Namespace(user_dir='fairseq_dpq'))\n"
        "print(sys.modules['fairseq_dpq'].DPQEmbedding.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "DPQEmbedding"


def test_every_requirement_is_pinned_once_and_names_no_index() -> None:
    pins: dict[str, str] = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            text = line.split("#")[0].strip()
            if not text:
                continue
            found = re.fullmatch(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.]+)", text)
            assert found, f"{path.name}: {text!r} is not NAME==VERSION"
            name = found.group(1).lower().replace("_", "-")
            assert name not in pins, f"{path.name}: {name} is pinned elsewhere, too"
            pins[name] = found.group(2)
    assert {"numpy", "hydra-core", "omegaconf", "fairseq-fixed", "pytest", "ruff"} <= set(pins)
    assert f"fairseq-fixed=={pins['fairseq-fixed']};" in (ROOT / "setup.py").read_text()
    assert "torch" not in pins  # its only home is the TORCH variable
    assert "torchaudio" not in pins


def test_torch_default_is_the_same_in_make_and_script() -> None:
    makefile = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    script = re.search(r'^DEFAULT_TORCH="(\S+)"$', SETUP.read_text(), re.MULTILINE)
    assert makefile is not None and script is not None
    assert makefile.group(1) == script.group(1) == "torch==2.13.0"


def test_continuous_integration_runs_lint_and_tests() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert "set -euo pipefail" in text
    assert text.index("make lint") < text.index("make test-install") < text.index("make test\n")
    assert text.index("make test\n") < text.index('wait "$install"')


def test_workflow_runs_the_same_on_every_supported_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["ci"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_citation_names_the_paper() -> None:
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Chen", "Li", "Sun"]
    assert (paper["year"], paper["url"]) == (2020, "https://arxiv.org/abs/1908.09756")


def _copy(folder: Path) -> Path:
    """A checkout with the set-up script alone: without requirements it ends in its first step."""
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(SETUP, folder / "scripts")
    return folder


def _set_up(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("TORCH", "VENV")}
    return subprocess.run(
        ["bash", str(checkout / "scripts" / "setup_env.sh")],
        env={**inherited, "PYTHON": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


def test_set_up_names_an_unusable_python_and_touches_nothing(tmp_path: Path) -> None:
    done = _set_up(_copy(tmp_path), PYTHON="/no/python", VENV=str(tmp_path / "new"))
    assert done.returncode == 1
    assert "PYTHON=/no/python is not a Python 3.11 or later" in done.stdout
    assert not (tmp_path / "new").exists()


makes_environments = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="set-up makes environments of Python 3.11 and later"
)


@makes_environments
def test_set_up_does_not_clear_a_folder_that_is_not_an_environment(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("years of work")
    done = _set_up(_copy(tmp_path), PYTHON=sys.executable, VENV=str(tmp_path / "thesis"))
    assert done.returncode == 1
    assert "exists and is not a virtual environment" in done.stdout
    assert (tmp_path / "thesis" / "chapter1").read_text() == "years of work"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script calls, except Python and a compiler."""
    folder = tmp_path_factory.mktemp("tools")
    names = "bash cat cut dirname getconf mkdir mktemp mv rm sha256sum shasum sleep tail"
    for name in names.split():
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)
    return folder


@makes_environments
def test_set_up_keeps_an_environment_that_runs(tmp_path: Path, tools: Path) -> None:
    checkout = _copy(tmp_path / "check out")
    venv = checkout / ".venv"
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "pip.py").write_text("assert __name__ != '__main__'")  # can be imported, at least
    (venv / ".setup").mkdir()
    stamp = venv / ".setup" / "venv"
    first_step = "setup: [1/6] torch==2.13.0 and the build tools\n"

    def say(**variables: str) -> str:
        # As after: source .venv/bin/activate
        done = _set_up(checkout, PATH=f"{venv}/bin:{tools}", **variables)
        assert done.returncode == 1
        lines = done.stdout.splitlines(keepends=True)
        return "".join(line for line in lines if line.startswith("setup: "))

    for old, python in (("", ""), ("", base), ("", sys.executable), (" /opt/python3.11", ""),
                        ("", str(venv / "bin" / "python"))):  # fmt: skip
        stamp.write_text(f"{venv}{old}\n")
        assert say(PYTHON=python).startswith(first_step), (old, python)

    # The old environment stays until its replacement can be built; here a compiler is missing.
    other = tmp_path / "other" / Path(base).name
    other.parent.mkdir()
    shutil.copy(base, other)  # another Python, if it runs away from its home
    if subprocess.run([other, "-c", "import ensurepip, venv"], stderr=-3).returncode == 0:
        assert say(PYTHON=str(other)).startswith("setup: error: no C++ compiler found")
    stamp.unlink()
    assert say().startswith("setup: error: no C++ compiler found")
    assert (site / "pip.py").exists()

    # The only Python is the environment's own: the one it was created with is used.
    stamp.write_text(f"{venv}\n")
    (site / "pip.py").unlink()
    assert say(CXX="cat").startswith(
        f"setup: {venv} has no Python with pip that runs: recreating it\n"
        f"setup: creating {venv} with Python {platform.python_version()}\nsetup:   done in "
    )
    assert (venv / "bin" / "pip").exists()
    assert stamp.read_text() == f"{venv}\n"


@makes_environments
def test_set_up_does_not_remove_the_only_python(tmp_path: Path, tools: Path) -> None:
    checkout = _copy(tmp_path)
    only = checkout / ".venv" / "bin" / "python3.11"
    only.parent.mkdir(parents=True)
    shutil.copy(os.path.realpath(getattr(sys, "_base_executable", sys.executable)), only)
    (only.parent / "python3").symlink_to(only.name)
    for python in ("", str(only)):
        done = _set_up(checkout, PATH=f"{only.parent}:{tools}", PYTHON=python)
        assert done.returncode == 1
        assert "Python 3.11 or later with venv, pip and C headers" in done.stdout
        assert only.exists()


# A flock like that of NFS, or of a disk without locks; Python imports it before anything else.
LOCKS = {
    "nfs": """
import errno, fcntl, os
real = fcntl.flock
def flock(handle, operation):
    mode = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE
    if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    real(handle, operation)
fcntl.flock = flock
""",
    "none": """
import errno, fcntl, os
def flock(handle, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = flock
""",
}


@pytest.mark.parametrize("case", ["nfs", "none", "unwritable"])
def test_set_up_goes_on_where_the_lock_is_not_held_by_another(tmp_path: Path, case: str) -> None:
    checkout = _copy(tmp_path)
    if case in LOCKS:
        (tmp_path / "sitecustomize.py").write_text(LOCKS[case])
    else:
        (tmp_path / ".setup.lock").mkdir()
    done = _set_up(checkout, PYTHON="/no/python", PYTHONPATH=str(tmp_path))
    warning = {
        "nfs": "",
        "none": f"setup: warning: .setup.lock: cannot be locked ([Errno {errno.ENOLCK}] No locks "
        "available); do not start a second make\n",
        "unwritable": "setup: warning: .setup.lock: cannot be locked (cannot write it); do not "
        "start a second make\n",
    }[case]
    assert done.stdout.startswith(f"{warning}setup: error: PYTHON=/no/python is not")


def test_set_up_waits_for_another_one(tmp_path: Path) -> None:
    checkout = _copy(tmp_path)
    with open(checkout / ".setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            ["bash", checkout / "scripts" / "setup_env.sh"],
            env={**os.environ, "PYTHON": "/no/python"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert second.stdout is not None
        first_line = second.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.5)
    rest, _ = second.communicate(timeout=30)
    assert first_line == "setup: another set-up of this checkout is running; waiting for it\n"
    assert rest.startswith("setup: error: PYTHON=/no/python is not")


def test_lock_file_is_not_for_git() -> None:
    assert "/.setup.lock" in (ROOT / ".gitignore").read_text().splitlines()


def test_second_set_up_has_nothing_to_do() -> None:
    """On the environment itself, with the values it was made with: nothing is rebuilt."""
    venv = ROOT / ".venv"
    files = [venv / ".setup" / name for name in ("package", "venv", "TORCH")]
    if not all(path.exists() for path in files) or files[1].read_text() != f"{venv}\n":
        pytest.skip("not in an environment that make has set up")
    start = time.monotonic()
    done = _set_up(ROOT, VENV=str(venv), TORCH=files[2].read_text().strip())
    assert done.returncode == 0
    assert done.stdout == ""
    assert time.monotonic() - start < 5
