"""Jobs of several commands: their order, what is run again, what is kept, what ends them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_dpq.runs import runner as module
from fairseq_dpq.runs.folder import RunsError, locked, read_json, working_in, write_whole
from fairseq_dpq.runs.runner import Job, Step, run_jobs

TOY = [sys.executable, str(Path(__file__).parent.parent / "helpers" / "toy_training.py")]


def step(name: str, code: str, **more) -> Step:
    return Step(name, [sys.executable, "-S", "-c", code], **more)


def trace(tmp_path: Path, word: str) -> str:
    """Code that leaves a mark of each time it runs."""
    return f"open({str(tmp_path / 'trace')!r}, 'a').write({word!r})"


def job(tmp_path: Path, *steps: Step, name: str = "one", **more) -> Job:
    return Job(name, tmp_path / name, list(steps), **more)


def test_steps_run_in_order_and_their_json_is_kept(tmp_path: Path) -> None:
    def finish(job: Job, steps: list[dict]) -> dict:
        assert [s["name"] for s in steps] == ["a", "b"]
        return {"score": job.output("b")["score"]}

    printed = "import sys; sys.stderr.write('note'); print('{\"score\": 4}')"
    one = job(
        tmp_path, step("a", trace(tmp_path, "a")), step("b", printed, json=True), finish=finish
    )
    result = run_jobs([one])["one"]
    assert (result["status"], result["score"]) == ("done", 4)
    assert one.done() == result == read_json(tmp_path / "one" / "result.json")
    assert (tmp_path / "one" / "b.log").read_text() == "note"
    run_jobs([one])
    assert (tmp_path / "trace").read_text() == "a"  # not again


def test_a_failed_job_goes_on_with_the_command_that_failed(tmp_path: Path, capsys) -> None:
    mark = tmp_path / "mended"
    code = f"import os, sys; print('last words'); os.path.exists({str(mark)!r}) or sys.exit(3)"
    one = job(tmp_path, step("a", trace(tmp_path, "a")), step("b", code))
    after = job(tmp_path, step("c", trace(tmp_path, "c")), name="two", after=("one",))
    results = run_jobs([after, one], workers=2)
    assert results["one"]["error"] == "b: exit code 3: last words" and "two" not in results
    assert f"one: FAILED, b: exit code 3: last words (logs: {tmp_path / 'one'})" in (
        capsys.readouterr().err
    )
    mark.touch()
    assert {r["status"] for r in run_jobs([after, one], workers=2).values()} == {"done"}
    assert (tmp_path / "trace").read_text() == "ac"


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b'{"status": "done"}'])
def test_a_damaged_result_counts_as_not_done(tmp_path: Path, text: bytes) -> None:
    one = job(tmp_path, step("a", trace(tmp_path, "a"), resumes=True))
    run_jobs([one])
    (tmp_path / "one" / "result.json").write_bytes(text)
    assert run_jobs([one])["one"]["steps"][0]["attempts"] == 2
    assert (tmp_path / "trace").read_text() == "aa"


def test_finish_may_refuse(tmp_path: Path) -> None:
    def finish(job: Job, steps: list[dict]) -> dict:
        raise RunsError("no score")

    result = run_jobs([job(tmp_path, step("a", "pass"), finish=finish)])["one"]
    assert (result["status"], result["error"]) == ("failed", "no score")


def test_progress_is_that_of_the_log_and_of_what_is_done(tmp_path: Path, capsys) -> None:
    """One of two jobs is done, the other at update 5 of 10."""
    first = job(tmp_path, step("a", "pass"))
    run_jobs([first])
    log = '| x | {\'max_update\': 10}\n| train_inner | {"num_updates": "5", "loss": "2"}'
    second = job(
        tmp_path, step("b", f"import time; print({log!r}, flush=True); time.sleep(1)"), name="two"
    )
    run_jobs([first, second], every=0.1)
    said = capsys.readouterr().err
    assert "\r" not in said  # no terminal
    lines = [line for line in said.splitlines() if "loss 2" in line]
    assert lines[-1].startswith("2 runs:  75%") and "two 50%, loss 2" in lines[-1]
    assert "so far, about " in lines[-1]


def test_cpu_time_is_that_of_the_command(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    jobs = [job(tmp_path, step("a", busy)), job(tmp_path, step("a", "pass"), name="two")]
    found = run_jobs(jobs)
    assert 0.5 <= found["one"]["steps"][0]["cpu_seconds"] < 1.0
    assert found["two"]["steps"][0]["cpu_seconds"] < 0.4
    assert found["one"]["steps"][0]["peak_bytes"] > 10**6


def test_a_guard_that_still_ends_a_command_is_waited_for(tmp_path: Path) -> None:
    """The runner before was killed; its guard holds the job's folder for a while."""
    (tmp_path / "one").mkdir()
    handle = os.open(tmp_path / "one" / ".running", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    guard = subprocess.Popen(["sleep", "1.5"], pass_fds=[handle])
    os.close(handle)
    run_jobs([job(tmp_path, step("a", "pass"))])
    assert guard.poll() is not None
    assert not (tmp_path / "one" / ".running").exists()


def test_a_guard_that_is_killed_takes_its_command_along(tmp_path: Path) -> None:
    guard = Path(module.__file__).with_name("guard.py")
    read, write = os.pipe()
    slow = [*TOY, "--wait", "100", "--save-dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-I", str(guard), str(tmp_path), *slow],
        stdin=read,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids = tmp_path / "pids"
    end = time.monotonic() + 30
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < end
        time.sleep(0.05)
    run, child = map(int, pids.read_text().split())
    process.kill()
    process.wait()
    while Path(f"/proc/{run}").exists() and "Z" not in Path(f"/proc/{run}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.close(read)
    os.close(write)
    os.kill(child, signal.SIGKILL)  # of this test: the guard is not there to find it


def test_files_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"old": 1}')
    (tmp_path / ".a.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "x" * 10_000)
    assert json.loads(path.read_text()) == {"old": 1} and os.listdir(tmp_path) == ["a.json"]


def test_one_process_works_in_a_folder(tmp_path: Path) -> None:
    with working_in(tmp_path / "out"):
        busy = r"another run is working in .*; wait for it, or give"
        with pytest.raises(RunsError, match=busy), working_in(tmp_path / "out"):
            pass
        with locked(tmp_path / "other", "busy"):
            pass
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == []
