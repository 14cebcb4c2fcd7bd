"""The layout of docs/architecture.md: which module imports which, how long files are, and that
every module is tested. Imports inside functions count as much as those at the top."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fairseq_dpq"
FAIRSEQ = ("fairseq", "fairseq_cli", "hydra", "omegaconf")

# The folders that may import fairseq. All other modules are the core, which needs torch alone.
KNOWS_FAIRSEQ = ("fairseq_plugin", "tasks", "models", "optim")
# Single functions elsewhere that import fairseq, because they need its dictionaries or commands.
MAY_IMPORT_FAIRSEQ = {
    "checkpoints.dictionaries",  # fairseq's own reader
    "checkpoints.upgrading",  # configs of old checkpoints are upgraded by fairseq's own code
    "cli.hydra_train",  # runs fairseq-hydra-train
    "cli.models",  # loads a model with fairseq's own code
}
TOOLS = ("checkpoints", "cli", "datasets", "demo", "report", "reproduce", "sweeps")

# Modules that no test file imports or is named after, and the test file that runs them.
TESTED_BY = {
    "any_model.report": "any_model/test_compress.py",
    "any_model.scaled": "any_model/test_compress.py",
    "checkpoints.quantizing": "cli/test_quantize.py",
    "checkpoints.upgrading": "cli/test_old_checkpoints.py",
    "cli.common": "cli/test_compact.py",
    "cli.hydra_train": "fairseq_plugin/test_around.py",
    "cli.inspect_text": "cli/test_inspect.py",
    "datasets.subwords": "datasets/test_wmt19.py",
    "datasets.text": "datasets/test_translation_sets.py",
    "fairseq_plugin.compat.attaching": "fairseq_plugin/test_training.py",
    "fairseq_plugin.compat.data": "fairseq_plugin/test_compat.py",
    "fairseq_plugin.compat.distributed": "fairseq_plugin/test_workers.py",
    "fairseq_plugin.compat.loading": "fairseq_plugin/test_compat.py",
    "fairseq_plugin.compat.patching": "fairseq_plugin/test_compat.py",
    "fairseq_plugin.compat.precision": "fairseq_plugin/test_compat.py",
    "fairseq_plugin.compat.starting": "fairseq_plugin/test_compat.py",
    "fairseq_plugin.hooks": "fairseq_plugin/test_around.py",
    "fairseq_plugin.measuring": "cli/test_suggest.py",
    "fairseq_plugin.plugin": "fairseq_plugin/test_around.py",
    "fairseq_plugin.replace": "fairseq_plugin/test_matrix.py",
    "fairseq_plugin.tensorboard": "fairseq_plugin/test_training.py",
    "fairseq_plugin.trial": "cli/test_compact.py",
    "forms.few_ids": "forms/test_product_codes.py",
    "forms.fitting": "test_fuzz.py",
    "forms.lookup": "forms/test_product_codes.py",
    "forms.product_layout": "test_fuzz.py",
    "forms.quantization": "forms/test_forms.py",
    "forms.shrinking": "forms/test_product_codes.py",
    "kept_table": "test_embedding.py",
    "methods.base": "test_quantizer.py",
    "methods.fixed_codes": "methods/test_additive.py",
    "methods.kd_codes": "methods/test_additive.py",
    "native.build": "native/test_native.py",
    "native.functions": "native/test_native.py",
    "native.table": "native/test_native.py",
    "optim.lazy_adam": "test_text_classification.py",
    "optim.dense": "test_sm3.py",
    "optim.quadratic_warmup": "test_schedules.py",
    "optim.sm3": "test_sm3.py",
    "precision": "test_embedding.py",
    "printable": "test_fuzz.py",
    "regularizer": "test_embedding.py",
    "statistics": "test_warmup.py",
    "sweeps.guard": "sweeps/test_runner.py",
    "tasks.lanes": "test_truncated_bptt_task.py",
    "tasks.truncated_bptt_lm": "test_truncated_bptt_task.py",
    "tracing": "forms/test_product_codes.py",
    "version": "test_setup.py",
}


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
    assert f"{PACKAGE}.fairseq_plugin.compat" in GRAPH[f"{PACKAGE}.checkpoints.loading"]
    assert f"{PACKAGE}.tasks.lanes" in GRAPH[f"{PACKAGE}.tasks.truncated_bptt_lm"]
    assert f"{PACKAGE}.initialization" in GRAPH[f"{PACKAGE}.statistics"]
    assert "fairseq.trainer" in GRAPH[f"{PACKAGE}.fairseq_plugin.compat.attaching"]


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
    core = [name for name in MODULES if name != PACKAGE and room(name) not in not_core]
    assert {f"{PACKAGE}.{n}" for n in ("embedding", "record", "forms.scalar")} <= set(core)
    for name in core:
        reached = {room(other) for other in GRAPH[name] if other in MODULES}
        assert not reached & not_core, name
    plugin = {short(n) for n in GRAPH[PACKAGE] if n in MODULES and room(n) in not_core}
    assert plugin == {"fairseq_plugin.on_import", "fairseq_plugin.plugin"}


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
    homes = {"config", "demo.commands", "reproduce.rows"}
    for name, path in MODULES.items():
        if room(name) != "methods" and short(name) not in homes:
            assert not branch.search(path.read_text(encoding="utf-8")), name


def _test_files() -> dict[str, set[str]]:
    """Test files by path, with what each imports."""
    folder = ROOT / "tests"
    return {
        path.relative_to(folder).as_posix(): imported(path) for path in folder.rglob("test_*.py")
    }


def test_every_module_has_a_test_file() -> None:
    tests = _test_files()
    by_import = {short(n) for names in tests.values() for n in names if n in MODULES}
    without = []
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            continue
        folder, _, file = short(name).rpartition(".")
        by_name = f"{folder.replace('.', '/')}/test_{file}.py".lstrip("/")
        if by_name not in tests and short(name) not in by_import:
            without.append(short(name))
    assert without == sorted(TESTED_BY), "add a test file, or the line of TESTED_BY that names it"
    assert set(TESTED_BY.values()) <= set(tests)


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_the_pages_name_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = re.findall(r"`([\w./]+\.(?:py|md|sh|part|txt))`", text)
    assert len(names) >= 10
    for name in names:
        if "NAME" not in name:
            places = [ROOT / name, ROOT / PACKAGE / name, ROOT / "tests" / name]
            places.append(ROOT / PACKAGE / "datasets" / name)
            assert any(place.exists() for place in places), name
