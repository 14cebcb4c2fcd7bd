"""Runs that end, fail, are killed and resumed; nothing outlives the sweep. The runs are those of
helpers/toy_training.py; tests/cli/test_sweep.py has fairseq's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_dpq.cli import sweep

TOY = [sys.executable, str(Path(__file__).parent.parent / "helpers" / "toy_training.py")]


def _sweep(out: Path, *flags: str, command: list[str] | None = None) -> int:
    words = ["--", *command] if command else []
    return sweep.main(["--out", str(out), *flags, *words])


def _results(out: Path) -> dict[str, dict]:
    lines = (out / "results.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _pids(out: Path) -> list[int]:
    found = out.glob("runs/*/checkpoints/pids")
    return [int(pid) for path in found for pid in path.read_text().split()]


def _wait(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


GRID = ["--dpq-K", "2", "8", "--dpq-D", "4", "--dpq-method", "sx"]


def test_every_run_has_a_folder_and_a_line(tmp_path: Path, capsys) -> None:
    """A failing run is reported and skipped; the others are done."""
    out = tmp_path / "out"
    flags = [*GRID[:-3], "4", "5", *GRID[-2:], "--workers", "2", "--threads", "1"]
    assert _sweep(out, *flags, command=TOY) == 1
    shown = capsys.readouterr()
    rows = _results(out)
    assert list(rows) == ["full", "sx-K2-D4", "sx-K2-D5", "sx-K8-D4", "sx-K8-D5"]
    assert rows["sx-K8-D4"]["scores"] == {"ppl": 30.3}  # 1000 / 33 at the last update
    assert rows["full"]["scores"] == {"ppl": 1000.0}
    assert rows["sx-K8-D4"]["updates"] == 4 and rows["sx-K8-D4"]["attempts"] == 1
    assert 0 < rows["sx-K8-D4"]["cpu_seconds"] < rows["sx-K8-D4"]["seconds"] + 1
    assert rows["sx-K8-D4"]["peak_bytes"] > 10**6
    failed = rows["sx-K2-D5"]
    assert failed["status"] == "failed"
    assert failed["error"] == (
        "train: exit code 1: ValueError: --dpq-D 5 does not divide --encoder-embed-dim 64"
    )
    assert "sx-K2-D5: FAILED, train: exit code 1: ValueError" in shown.err
    assert "sx-K8-D5: failed" in shown.out
    for name in rows:
        folder = out / "runs" / name
        kept = json.loads((folder / "result.json").read_text())
        assert kept["status"] == rows[name]["status"]
        assert kept.get("scores", {}) == rows[name]["scores"]
        assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
    assert "--save-dir" in rows["full"]["command"]


def test_finished_runs_are_kept_and_failed_ones_tried_again(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert _sweep(out, *GRID, "--limit", "2", command=TOY) == 0
    assert list(_results(out)) == ["full", "sx-K2-D4"]
    stamps = [(out / "runs" / name / "train.log").stat().st_mtime_ns for name in _results(out)]
    assert _sweep(out, *GRID, command=TOY) == 2  # without --resume
    assert "has a sweep; go on with --resume" in capsys.readouterr().err
    assert _sweep(out, "--resume", command=["other"]) == 2
    assert "was started with another command" in capsys.readouterr().err
    assert _sweep(out, "--resume", "--json") == 0  # command and grid are known
    facts = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in facts["runs"]] == ["full", "sx-K2-D4", "sx-K8-D4"]
    assert stamps == [
        (out / "runs" / name / "train.log").stat().st_mtime_ns for name in ("full", "sx-K2-D4")
    ]
    failed = json.loads((out / "runs/full/result.json").read_text())
    failed["status"] = "failed"
    (out / "runs/full/result.json").write_text(json.dumps(failed))
    assert _sweep(out, "--resume", "--dry-run") == 0
    assert capsys.readouterr().out.count("runs/full/checkpoints") == 1
    assert _sweep(tmp_path / "none", "--resume") == 2


def test_dry_run_writes_nothing(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert _sweep(out, *GRID, "--dry-run", command=[*TOY, "data dir"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and not out.exists()
    assert "'data dir' --dpq-K 8 --dpq-D 4 --dpq-method sx --save-dir" in lines[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_sweep_leaves_nothing_and_goes_on(tmp_path: Path, number: int, capsys) -> None:
    """Also the run's own child ends. The resumed run goes on from update 3, with the same score."""
    out = tmp_path / "out"
    slow = [*TOY, "--wait", "100", "--slow", "8", "--max-update", "4"]
    (out / "runs/sx-K8-D4/checkpoints").mkdir(parents=True)
    (out / "runs/sx-K8-D4/checkpoints/progress").write_text("3")
    words = ["--out", str(out), *GRID, "--workers", "3", "--", *slow]
    process = subprocess.Popen(
        [sys.executable, "-m", "fairseq_dpq.cli.sweep", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell starts background jobs, such as these tests may be, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    done = [out / "runs" / name / "result.json" for name in ("full", "sx-K2-D4")]
    hanging = out / "runs/sx-K8-D4/checkpoints/pids"
    _wait(lambda: all(path.exists() for path in done) and hanging.exists(), 60)
    pids = _pids(out)
    assert len(pids) == 6 and all(map(_alive, map(int, hanging.read_text().split())))
    # a second sweep on the folder refuses
    assert _sweep(out, "--resume") == 2
    assert f"another run is working in {out}" in capsys.readouterr().err
    process.send_signal(number)
    assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -9)
    _wait(lambda: not any(map(_alive, pids)), 10)
    text = process.communicate()[0]
    assert number == signal.SIGKILL or "go on with: fairseq-dpq-sweep --out" in text
    note = out / "sweep.json"
    note.write_text(note.read_text().replace('"100"', '"0"'))
    assert _sweep(out, "--resume") == 0
    row = _results(out)["sx-K8-D4"]
    assert (row["scores"], row["attempts"], row["updates"]) == ({"ppl": 30.3}, 2, 4)
    assert row["status"] == "done" and len(_results(out)) == 3
    assert not list(out.rglob(".*"))  # no lock of what was killed, nor of what has ended


def test_program_that_does_not_exist_is_a_failed_run(tmp_path: Path) -> None:
    assert _sweep(tmp_path, "--dpq-K", "2", "--dpq-D", "4", "--no-full", command=["none-such"]) == 1
    row = _results(tmp_path)["sx-K2-D4"]
    assert row["error"] == "train: exit code 127: none-such: No such file or directory"


def test_a_wrong_command_is_not_run_for_the_whole_grid(tmp_path: Path, capsys) -> None:
    assert _sweep(tmp_path, *GRID, "--workers", "1", command=["none-such"]) == 1
    assert list(_results(tmp_path)) == ["full"]
    assert "failed before its first update, so that no other is started" in capsys.readouterr().err


def test_figures_of_old_results(tmp_path: Path, capsys) -> None:
    assert _sweep(tmp_path, *GRID, command=TOY) == 0
    (tmp_path / "results.jsonl").write_text(
        (tmp_path / "results.jsonl").read_text().replace("1000.0", "999.0")
    )
    capsys.readouterr()
    assert _sweep(tmp_path, "--plot-only") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:3] == ["full", "999", "-"]
    assert str(tmp_path / "figures/heat-maps.svg") in out
    assert _sweep(tmp_path, "--plot-only", "--metric", "bleu") == 2
    assert "--metric bleu: the runs have ppl" in capsys.readouterr().err
    assert _sweep(tmp_path / "none", "--plot-only") == 2


def test_places_that_cannot_be_a_sweep(tmp_path: Path, capsys) -> None:
    """One line and exit code 2, whatever --out is."""
    (tmp_path / "file").write_text("thesis")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    places = [tmp_path / "file", tmp_path / "file" / "in", Path("/proc/none"), damaged]
    places += [Path(os.fsdecode(bytes(tmp_path / "file") + b"/\xff"))]
    for text in (b"", b"{", b"\xff", b"[]", b'{"base": 3}', b"[" * 100_000):
        (damaged / "sweep.json").write_bytes(text)
        for out in places:
            for flags in ([], ["--resume"], ["--plot-only"]):
                command = None if flags else TOY
                assert _sweep(out, *flags, command=command) == 2, (out, flags)
                error = capsys.readouterr().err
                assert error.startswith("fairseq-dpq-sweep: error: ") and error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "thesis"


def test_a_full_disk_is_one_line(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / ".sweep.json.part").symlink_to("/dev/full")
    assert _sweep(tmp_path, *GRID, command=TOY) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and error.count("\n") == 1
    assert not (tmp_path / "sweep.json").exists() and not (tmp_path / "runs").exists()
