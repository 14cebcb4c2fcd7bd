"""The layout of docs/architecture.md: which module imports which, how long files are, and that
every module is tested. Imports inside functions count as much as those at the top."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fairseq_dpq"
FAIRSEQ = ("fairseq", "fairseq_cli", "hydra", "omegaconf")

# The folders that may import fairseq. All other modules are the core, which needs torch alone.
KNOWS_FAIRSEQ = ("fairseq_plugin",)
# Single functions elsewhere that import fairseq, because they need its dictionaries or commands.
MAY_IMPORT_FAIRSEQ = {
    "files.data",  # fairseq's own readers of dictionaries, data and models
    "files.preparing",  # configs of old checkpoints are upgraded by fairseq's own code
    "cli.hydra_train",  # runs fairseq-hydra-train
}
TOOLS = ("cli", "report", "sweeps")


def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package stands for its `__init__.py`."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def imported(path: Path, name: str = "") -> set[str]:
    """What a file imports, anywhere in it: modules of this package, or the name as written."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in MODULES else source)
    return found - {name}


GRAPH = {name: imported(path, name) for name, path in MODULES.items()}


def short(name: str) -> str:
    return name[len(PACKAGE) + 1 :]


def room(name: str) -> str:
    """The folder of a module; empty at the root of the package."""
    return (
        short(name).split(".")[0] if "." in short(name) or MODULES[name].stem == "__init__" else ""
    )


def test_graph_sees_imports_of_every_kind() -> None:
    """At the top, inside a function, relative, of a module and of a name in it."""
    assert f"{PACKAGE}.methods.base" in GRAPH[f"{PACKAGE}.methods.low_rank"]
    assert f"{PACKAGE}.fairseq_plugin.compat" in GRAPH[f"{PACKAGE}.files.loading"]
    assert (
        f"{PACKAGE}.fairseq_plugin.tasks.examples" in GRAPH[f"{PACKAGE}.fairseq_plugin.tasks.squad"]
    )
    assert f"{PACKAGE}.training.codebook" in GRAPH[f"{PACKAGE}.training.trackers"]
    assert "fairseq.trainer" in GRAPH[f"{PACKAGE}.fairseq_plugin.hooks"]


def test_only_some_folders_import_fairseq() -> None:
    direct = {
        short(name)
        for name, names in GRAPH.items()
        if any(other.split(".")[0] in FAIRSEQ for other in names)
    }
    outside = {name for name in direct if name.split(".")[0] not in KNOWS_FAIRSEQ}
    assert outside == MAY_IMPORT_FAIRSEQ


def test_core_imports_nothing_that_knows_fairseq() -> None:
    """Neither directly nor through another module. The package itself only waits for fairseq."""
    not_core = {*KNOWS_FAIRSEQ, *TOOLS}
    outside = {n for n in MODULES if room(n) in not_core}
    outside |= {n for n in MODULES if GRAPH[n] & outside and room(n) == "files"}
    outside |= {n for n in MODULES if GRAPH[n] & outside and room(n) == "files"}
    core = set(MODULES) - outside - {PACKAGE}
    assert {f"{PACKAGE}.{n}" for n in ("layer", "files.record", "forms.scalar")} <= core
    for name in core:
        assert not GRAPH[name] & outside, name
    plugin = {short(n) for n in GRAPH[PACKAGE] if n in MODULES and room(n) in not_core}
    assert plugin == {"fairseq_plugin.plugin"}


def test_tools_are_not_imported_by_the_plugin() -> None:
    for name in MODULES:
        if room(name) in KNOWS_FAIRSEQ:
            assert not {room(n) for n in GRAPH[name] if n in MODULES} & set(TOOLS), name


def test_no_module_imports_itself_in_a_circle() -> None:
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(GRAPH[name] & set(MODULES)):
                walk(other, [*trail, name])
            done.add(name)

    for name in MODULES:
        walk(name, [])
    assert done == set(MODULES)


def test_files_are_short() -> None:
    lines = {n: len(p.read_text(encoding="utf-8").splitlines()) for n, p in MODULES.items()}
    assert {n: count for n, count in lines.items() if count > 400} == {}
    assert sorted(lines.values())[len(lines) // 2] < 150


def test_methods_are_told_apart_in_their_folder_only() -> None:
    branch = re.compile(r"""method\s*(==|!=|\bin\b)\s*[("']|["'](sx|vq)["']""")
    # The options have a default method; the demo and the paper's tables have models of each.
    homes = {"config"}
    for name, path in MODULES.items():
        if room(name) != "methods" and short(name) not in homes:
            assert not branch.search(path.read_text(encoding="utf-8")), name


def test_forms_are_told_apart_in_their_folder_only() -> None:
    """A form answers for itself: nobody else asks for its class, nor for its kind. Methods name the
    kinds that can hold them."""
    forms = importlib.import_module("fairseq_dpq.forms")
    classes = "|".join(form.__name__ for form in forms.FORMS.values())
    asked = re.compile(rf"isinstance\([^()]*\b({classes})\b|type\(.*\b({classes})\b")
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if room(name) != "forms":
            assert not asked.search(text), name
        if room(name) not in ("forms", "methods"):
            nodes = list(ast.walk(ast.parse(text)))
            keys = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
            words = {n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in keys}
            assert not words & set(forms.FORMS), name


def _test_files() -> dict[str, set[str]]:
    """Test files by path, with what each imports."""
    folder = ROOT / "tests"
    return {
        path.relative_to(folder).as_posix(): imported(path) for path in folder.rglob("test_*.py")
    }


def test_every_module_is_reached_by_a_test() -> None:
    """Through what the test files import, and what that imports. Commands run as processes."""
    reached: set[str] = set()
    waiting = {name for names in _test_files().values() for name in names if name in MODULES}
    while waiting:
        reached |= waiting
        waiting = {n for name in waiting for n in GRAPH[name] if n in MODULES} - reached
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    without = {short(n) for n in MODULES.keys() - reached - packages if room(n) != "cli"} - {
        "runs.guard"
    }
    assert without == set()


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_the_pages_name_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = re.findall(r"`([\w./]+\.(?:py|md|sh|part|txt))`", text)
    assert len(names) >= 10
    for name in names:
        if "NAME" not in name:
            places = [ROOT / name, ROOT / PACKAGE / name, ROOT / "tests" / name]
            places.append(ROOT / "experiments" / "datasets" / name)
            assert any(place.exists() for place in places), name
