"""The demo's runner: finished steps are kept, failures show the command and its last words, and
the table's numbers are right. The demo itself is run by make demo."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from fairseq_dpq.demo import commands, run, table
from fairseq_dpq.demo.commands import MODELS, Setting
from fairseq_dpq.demo.status import Status

pytestmark = pytest.mark.slow

PYTHON = Path(sys.executable).name


@pytest.fixture
def runner(tmp_path: Path) -> run.Runner:
    run.prepare(tmp_path, Setting())
    return run.Runner(tmp_path, Setting(), Status({"a": 1.0, "b": 3.0}))


def append(word: str) -> list[str]:
    """A command that leaves a trace of each time it runs."""
    return [PYTHON, "-c", f"open('trace', 'a').write('{word}'); print('said {word}')"]


def test_finished_step_is_kept_and_a_changed_one_runs(runner, tmp_path: Path) -> None:
    lines: list[str] = []
    runner.step("one", append("x"), lines.append)
    runner.step("one", append("x"), lines.append)
    assert (tmp_path / "trace").read_text() == "x"
    runner.step("one", append("y"), lines.append)
    assert (tmp_path / "trace").read_text() == "xy"
    assert lines == ["said x\n", "said y\n"]
    assert (tmp_path / "logs" / "one.log").read_text() == "said y\n"


def test_step_counts_the_cpu_time_of_its_own_child(runner) -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    seconds = runner.step("busy", [PYTHON, "-S", "-c", busy])["seconds"]
    assert 0.5 <= seconds < 0.9
    idle = runner.step("idle", [PYTHON, "-S", "-c", "import time; time.sleep(0.5)"])["seconds"]
    assert idle < 0.4


def test_failed_step_shows_command_and_output_and_is_not_kept(runner, tmp_path: Path) -> None:
    with pytest.raises(run.StepFailed, match=r"(?s)last words.*-c.*ended with code 3"):
        runner.step("bad", [PYTHON, "-c", "print('last words'); raise SystemExit(3)"])
    assert not (tmp_path / "logs" / "bad.done").exists()


def test_missing_command_is_named(runner) -> None:
    with pytest.raises(run.StepFailed, match="fairseq-nothing is not installed"):
        runner.step("none", ["fairseq-nothing"])


def test_stop_ends_running_commands(runner) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            runner.step("sleep", [PYTHON, "-c", "import time; time.sleep(60)"])
        except run.StepFailed as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not runner._children:
        time.sleep(0.01)
    runner.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert "ended with code -15" in str(errors[0])
    with pytest.raises(run.StepFailed, match="stopped"):
        runner.step("more", append("z"))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("error", [OSError, KeyError, ValueError])
def test_no_training_outlives_an_error_of_the_demo_itself(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """One command makes the demo fail, without failing itself, while two others sleep."""
    ways = {
        OSError: "import shutil; shutil.rmtree('logs')",
        KeyError: "print('| train_inner | {}', flush=True); time.sleep(60)",
        ValueError: "print('| train_inner | {torn}', flush=True); time.sleep(60)",
    }
    wait = "import os, time\nwhile not (os.path.exists('sx.pid') and os.path.exists('vq.pid')):"
    bad = f"{wait} time.sleep(0.01)\n{ways[error]}"
    note = "open('part-%s', 'w').write(str(os.getpid())); os.rename('part-%s', '%s.pid')"

    def train(setting: Setting, model: commands.Model) -> list[str]:
        sleep = f"import os, time; {note.replace('%s', model.folder)}; time.sleep(60)"
        return [PYTHON, "-c", bad if model.method is None else sleep]

    monkeypatch.setattr(commands, "preprocess", lambda setting: [PYTHON, "-c", "pass"])
    monkeypatch.setattr(commands, "train", train)
    before = signal.getsignal(signal.SIGTERM)
    try:
        small = ["--train", "20", "--valid", "5", "--test", "5"]
        if error is OSError:
            assert run.main(["--out", str(tmp_path), *small]) == 1
            assert "demo: [Errno 2] No such file" in capsys.readouterr().err
        else:
            with pytest.raises(error):
                run.main(["--out", str(tmp_path), *small])
    finally:
        signal.signal(signal.SIGTERM, before)
    pids = [int((tmp_path / f"{name}.pid").read_text()) for name in ("sx", "vq")]
    end = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in pids if _alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_interrupted_run_is_resumed_and_other_ones_are_removed(
    runner, tmp_path: Path, capsys
) -> None:
    runner.step("one", append("x"))
    run.prepare(tmp_path, Setting())
    assert "finished steps are kept" in capsys.readouterr().out
    assert (tmp_path / "logs" / "one.done").exists()
    run.prepare(tmp_path, Setting(updates=2))
    assert not (tmp_path / "logs" / "one.done").exists()
    runner.step("one", append("x"))
    (tmp_path / "result.json").write_text("[]")
    run.prepare(tmp_path, Setting(updates=2))
    assert not (tmp_path / "logs" / "one.done").exists()
    assert not (tmp_path / "result.json").exists()
    assert (tmp_path / "trace").exists()  # what the demo did not write stays


def test_training_commands_differ_in_dpq_flags_only() -> None:
    full, *others = (" ".join(commands.train(Setting(K=8, D=4), model)) for model in MODELS)
    assert "--dpq" not in full
    for method, command in zip(("sx", "vq"), others):
        flags = f"--dpq-K 8 --dpq-D 4 --dpq-method {method} "
        assert command.count(flags) == 1
        rest = command.replace(flags, "").replace("--dpq-no-normalize ", "")
        rest = rest.replace(f"--save-dir {method}", "--save-dir full")
        assert rest == full


def test_formula_ratio_is_the_papers() -> None:
    # IWSLT-like: 32 n d / (n D log2 K + 32 K d), worked by hand
    assert table.formula_ratio(10000, 512, 32, 16) == pytest.approx(163840000 / (800000 + 524288))
    assert table.formula_ratio(10000, 512, 5, 16) == pytest.approx(163840000 / (480000 + 81920))


def test_bleu_needs_every_sentence() -> None:
    output = "H-0\t-0.1\ta b\nH-1\t-0.2\tc\nGenerate test with beam=5: BLEU = 37.45 69.7/46.7\n"
    assert table.read_bleu(output, 2) == 37.45
    with pytest.raises(RuntimeError, match="translated 2 of 3"):
        table.read_bleu(output, 3)
    with pytest.raises(RuntimeError, match="no BLEU"):
        table.read_bleu("H-0\t-0.1\ta\n", 1)


def test_table_shows_every_number() -> None:
    rows = [
        table.Row("full table", 61.25, 1000000, 1.0, 1.0, 2000000, 1.0, 81.4),
        table.Row("DPQ-SX", 60.04, 48000, 21.3, 20.8, 1048000, 1.9084, 84.0),
    ]
    full, small = (line.split() for line in table.render(rows).splitlines()[3:])
    assert " ".join(full) == "full table 61.2 1,000,000 1.0 1.0 2,000,000 1.00 81"
    assert " ".join(small) == "DPQ-SX 60.0 48,000 21.3 20.8 1,048,000 1.91 84"
    assert json.loads(json.dumps(rows[1].as_dict()))["embedding_bytes"] == 48000


def test_readme_shows_the_table_as_it_is_printed() -> None:
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```text\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    (shown,) = (textwrap.dedent(block) for block in blocks if "BLEU" in block)
    rows = []
    for line in shown.splitlines()[3:]:
        model, *cells = re.split(r"  +", line)
        number = [float(cell.replace(",", "")) for cell in cells]
        for at in (1, 4):  # bytes
            number[at] = int(number[at])
        rows.append(table.Row(model, *number))
    assert [row.model for row in rows] == [model.title for model in MODELS]
    # Like with like: what a model saves is what its embedding saves.
    full, *small = rows
    for row in small:
        saved = full.embedding_bytes - row.embedding_bytes
        assert full.model_bytes - row.model_bytes == saved
        assert row.model_ratio == round(full.model_bytes / row.model_bytes, 2)
    assert shown == table.render(rows) + "\n"


def test_status_weighs_jobs_by_their_work() -> None:
    status = Status({"a": 1.0, "b": 3.0})
    status.report("a", 1)
    status.report("b", 1 / 3, "b loss 2.5")
    assert " 50% " in status.line()
    assert status.line().endswith("b loss 2.5")
    assert status.line().count("#") == 12
    status.report("b", 1, "gone")
    assert "100%" in status.line()
    assert "loss" not in status.line()
