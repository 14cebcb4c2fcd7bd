"""Whole files or none: killed at many points, disks that are full, targets that exist."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import fairseq  # noqa: F401, once here and not in every child
import pytest
import torch

from fairseq_dpq.cli import compact
from fairseq_dpq.files import writer
from fairseq_dpq.files.errors import CheckpointError
from helpers.toy_checkpoints import load, make_layer, save_toy


def _run_until(step: int, argv: list[str], tally: Path | None = None) -> int:
    """Run the tool in a child that kills itself at its `step`-th call or return; the status."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = step

    def count(frame, event, argument) -> None:
        nonlocal left
        name = frame.f_code.co_filename
        # calls of C functions too: they are where files are opened, written, synced and renamed
        if "fairseq_dpq" in name or "serialization" in name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.setprofile(count)
        code = compact.main(argv)
        sys.setprofile(None)
        if tally is not None:
            tally.write_text(str(step - left))
    except BaseException:
        code = 99
    finally:
        sys.setprofile(None)
    os._exit(code)


@pytest.mark.parametrize("force", [False, True])
def test_killed_at_any_point(tmp_path, force) -> None:
    source, target = save_toy(tmp_path / "in.pt", make_layer(n=2000)), tmp_path / "out.pt"
    before = source.read_bytes()
    argv = [str(source), str(target)]
    assert _run_until(10**9, argv, tmp_path / "steps") == 0
    steps = int((tmp_path / "steps").read_text())
    assert steps > 1000
    whole = load(target)
    old = b"what was there before"
    seen = {}
    litter: list[int] = []

    def kill_at(step: int) -> str:
        """What is there when the tool is killed at this step."""
        target.unlink(missing_ok=True)
        if force:
            target.write_bytes(old)
        status = _run_until(step, [*argv, *(["--force"] if force else [])])
        assert status in (0, signal.SIGKILL)
        litter.append(len(list(tmp_path.glob(".*.tmp"))))
        assert source.read_bytes() == before
        if not target.exists() or target.read_bytes() == old:
            assert status != 0 and target.exists() == force
            return "before"
        state = load(target)
        assert list(state["model"]) == list(whole["model"])
        assert all(torch.equal(t, whole["model"][key]) for key, t in state["model"].items())
        return "whole" if status == 0 else "whole, killed"

    for step in range(1, steps + 10, steps // 16):
        seen[step] = kill_at(step)
    # Then closer and closer to the moment at which the file gets its name.
    low = max(step for step, what in seen.items() if what == "before")
    high = min(step for step, what in seen.items() if what != "before")
    while high - low > 1:
        middle = (low + high) // 2
        seen[middle] = kill_at(middle)
        low, high = (middle, high) if seen[middle] == "before" else (low, middle)
    for step in range(low - 6, high + 7):
        seen[step] = seen.get(step) or kill_at(step)
    assert {"before", "whole, killed"} <= set(seen.values())
    assert len(seen) > 30
    # A killed run leaves its temporary file, the next one removes it.
    assert max(litter) == 1
    assert _run_until(10**9, [*argv, "--force"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["in.pt", "out.pt", "steps"]


def test_two_runs_on_one_target(tmp_path) -> None:
    target = tmp_path / "out"
    other = tmp_path / f".out.{os.getpid()}.00000000.tmp"
    other.write_bytes(b"of a dead process")
    strange = tmp_path / ".out.notes.tmp"
    strange.write_bytes(b"not ours")

    def write(file) -> None:
        file.write(b"first")
        with pytest.raises(CheckpointError, match=f"another run is writing {target}"):
            writer.write_whole(target, lambda file: file.write(b"second") and None, force=True)

    writer.write_whole(target, write, force=True)
    assert target.read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == [".out.notes.tmp", "out"]


def test_a_full_disk_is_said_in_one_line(tmp_path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with full.open("wb", buffering=0) as file, pytest.raises(
        OSError, match="No space left on device"
    ):
        writer.save_state({"a": torch.zeros(100_000)}, file)


def test_a_disk_that_takes_only_so_much(tmp_path, capsys) -> None:
    """A limit of the operating system on file sizes stands in for the full disk."""
    source, target = save_toy(tmp_path / "in.pt", make_layer(n=5000)), tmp_path / "out.pt"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        code = compact.main([str(source), str(target)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1
    assert f"cannot write {target}: File too large (" in said and "bytes are free there" in said
    assert os.listdir(tmp_path) == ["in.pt"]


def test_targets_that_would_destroy_something(tmp_path, capsys) -> None:
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.pt"
    other = save_toy(tmp_path / "other.pt", make_layer(seed=5))
    before = source.read_bytes()
    link, hard = tmp_path / "link.pt", tmp_path / "hard.pt"
    link.symlink_to(source)
    os.link(source, hard)
    for same in (source, link, hard, tmp_path / ".." / tmp_path.name / "in.pt"):
        assert compact.main([str(source), str(same), "--force"]) == 2
        assert "is the input itself" in capsys.readouterr().err
    argv = ["--average", str(other), str(source), str(source)]
    assert compact.main([*argv, "--force"]) == 2
    assert source.read_bytes() == before

    target.write_text("precious")
    assert compact.main([str(source), str(target)]) == 2
    assert f"{target} exists; use --force" in capsys.readouterr().err
    assert target.read_text() == "precious"
    assert compact.main([str(source), str(target), "--force"]) == 0
    assert load(target)["model"]

    assert compact.main([str(source), str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert compact.main([str(source), str(tmp_path / "no" / "out.pt")]) == 2
    assert "the folder of" in capsys.readouterr().err


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path) -> None:
    target = tmp_path / "out"

    def write(file) -> None:
        file.write(b"ours")
        target.write_text("theirs")

    with pytest.raises(CheckpointError, match="exists"):
        writer.write_whole(target, write)
    assert target.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out"]


def test_nothing_is_left_when_the_check_fails(tmp_path) -> None:
    def check(part: Path) -> None:
        assert part.read_bytes() == b"ours"
        raise CheckpointError("no good")

    with pytest.raises(CheckpointError, match="no good"):
        writer.write_whole(tmp_path / "out", lambda file: file.write(b"ours") and None, check)
    assert os.listdir(tmp_path) == []


def test_permissions_are_those_of_any_new_file(tmp_path) -> None:
    writer.write_whole(tmp_path / "a", lambda file: None)
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
