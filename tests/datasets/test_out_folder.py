"""Where --out may be, and that two runs do not write the same one."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.datasets import folders
from experiments.datasets.cli import DataSet, Run, run_main
from experiments.datasets.folders import STAMP, build_folder
from fairseq_dpq.runs.folder import RunsError, locked
from helpers.data_server import tree


def prepare(out: object, work: object, *flags: object, wait: Path | None = None) -> int:
    """A minimal prepare script that waits until the file `wait` exists."""

    class Toy(DataSet):
        title = description = "toy"

        def build(self, run: Run, folder: Path) -> list[str]:
            (folder / "train.bin").write_text("data")
            while wait is not None and not wait.exists():
                time.sleep(0.01)
            return ["3 files"]

    words = ["--out", out, "--work", work, *flags]
    return run_main("toy", Toy(), [str(word) for word in words])


def test_the_report_is_kept_in_the_stamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for state in ("done", "up to date, nothing to do"):
        assert prepare(tmp_path / "bin", tmp_path / "w") == 0
        assert capsys.readouterr().out == f"| 3 files\n| {tmp_path / 'bin'}: {state}\n"
    stamp = tmp_path / "bin" / STAMP
    stamp.write_text(stamp.read_text().replace('"report"', '"lines"'))  # of an older version
    assert prepare(tmp_path / "bin", tmp_path / "w") == 0
    assert capsys.readouterr().out == f"| {tmp_path / 'bin'}: up to date, nothing to do\n"


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_second_run_with_the_same_out_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, half = tmp_path / "bin", tmp_path / ".bin.partial" / "train.bin"
    go_on, work = tmp_path / "go on", tmp_path / "w1"

    def run_first() -> None:
        sys.exit(prepare(out, work, wait=go_on))

    first = multiprocessing.get_context("fork").Process(target=run_first)
    first.start()
    try:
        while not half.exists() and first.is_alive():
            time.sleep(0.01)
        # As the error says: another --work. Through a link it is the same --out.
        (tmp_path / "link").symlink_to(out)
        for name in (out, tmp_path / "link"):
            assert prepare(name, tmp_path / "w2") == 2
            assert capsys.readouterr().err == (
                f"prepare.sh toy: error: another run is writing --out {out}; wait for it, or pass "
                "another --out and --work\n"
            )
            assert half.exists() and not (tmp_path / "w2").exists()
        assert prepare(tmp_path / "other", work) == 2
        assert capsys.readouterr().err == (
            f"prepare.sh toy: error: another run is using --work {work}; wait for it, or pass "
            "another --work and --out\n"
        )
    finally:
        go_on.touch()
        first.join(30)
    assert first.exitcode == 0
    assert tree(out) == [STAMP, "train.bin"] and hidden(tmp_path) == [] and not work.exists()
    (tmp_path / ".bin.lock").touch()  # as a killed run leaves it
    assert prepare(out, tmp_path / "w2", "--force") == 0
    assert hidden(tmp_path) == []


def test_a_lock_is_exclusive_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / ".lock"
    with locked(path, "busy"):
        assert path.exists()
        with pytest.raises(RunsError, match="busy"), locked(path, "busy"):
            pass
        assert path.exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".lock").touch()  # as a killed run leaves it
    with locked(tmp_path / ".lock", "busy"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_out_may_be_a_link_to_another_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, home = tmp_path / "disk" / "ptb", tmp_path / "home"
    disk.mkdir(parents=True)
    home.mkdir()
    (home / "ptb").symlink_to(disk)
    for flags in ([], ["--force"]):
        assert prepare(home / "ptb", tmp_path / "w", *flags) == 0
        assert (home / "ptb").is_symlink() and not disk.is_symlink()
        assert tree(disk) == [STAMP, "train.bin"]
        assert (hidden(home), hidden(disk.parent)) == ([], [])
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"| {home / 'ptb'}: done"  # as it was given
    shutil.rmtree(disk)  # a link to a folder that does not exist yet
    assert prepare(home / "ptb", tmp_path / "w") == 0
    assert (home / "ptb").is_symlink() and tree(disk) == [STAMP, "train.bin"]


def test_leftover_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    for name in (".x.old", ".x.partial"):
        (tmp_path / name).symlink_to(precious)
    assert build_folder(tmp_path / "x", {}, lambda folder: {"n": 1}) == ({"n": 1}, True)
    assert tree(precious) == ["thesis.txt"]
    assert hidden(tmp_path) == [] and tree(tmp_path / "x") == [STAMP]


@pytest.mark.parametrize("case", [".", "..", "loop", "work", "from", "/"])
def test_places_that_cannot_be_replaced(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, here = tmp_path / "in", tmp_path / "here"
    source.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "loop").symlink_to("loop")
    out = {"loop": tmp_path / "loop", "work": tmp_path / "a", "from": source}.get(case, case)
    work = tmp_path / "a" / "w"
    before = sorted(tmp_path.rglob("*"))
    assert prepare(out, work, "--from", source) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"prepare.sh toy: error: --out {out}")
    expected = {
        "loop": "is a symbolic link to itself; give a folder",
        "work": f"contains --work {work}; choose a folder in it, e.g. --out {out}/data",
        "from": f"contains --from {source}; ",
        "/": "is a mount point and cannot be replaced; choose a folder in it, e.g. --out /data",
    }.get(case, "is replaced as a whole, but contains the current folder ")
    assert expected in error
    assert sorted(tmp_path.rglob("*")) == before


def test_bind_mount_is_detected(tmp_path: Path) -> None:
    """A real bind mount in its own namespace, which os.path.ismount does not detect."""
    space = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*space, "true"], stderr=-3).returncode:
        pytest.skip("no mounts in a name space of one's own here")
    for name in ("empty", "my disk"):
        (tmp_path / name).mkdir()
    # The package without its __init__, which would import torch.
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "from experiments.datasets.folders import find_out\n"
        "find_out(pathlib.Path('my disk'), {})"
    )
    script = 'mount --bind empty "my disk" && exec "$@"'
    done = subprocess.run(
        [*space, "sh", "-c", script, "sh", sys.executable, "-c", code,
         Path(folders.__file__).parents[2]],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    message = "--out my disk is a mount point and cannot be replaced; choose a folder in it, e.g. "
    assert message + f"--out {tmp_path}/my disk/data" in done.stderr
