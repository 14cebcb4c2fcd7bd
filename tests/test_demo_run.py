"""The demo's list of commands, what is kept of an interrupted run, and the table's numbers. `make
demo` runs the demo itself; tests/runs has what it shares with sweeps."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch

from experiments.demo import commands, run, table
from experiments.demo.commands import MODELS, Setting
from experiments.demo.corpus import TARGET
from fairseq_dpq.files.errors import CheckpointError


def test_an_interrupted_run_goes_on_and_other_ones_are_removed(tmp_path: Path, capsys) -> None:
    run.prepare(tmp_path, Setting())
    (tmp_path / "logs").mkdir()
    run.prepare(tmp_path, Setting())
    assert "finished steps are kept" in capsys.readouterr().out
    assert (tmp_path / "logs").exists()
    (tmp_path / "own.txt").touch()  # what the demo did not write stays
    for damage in (b"{", b"\xff", json.dumps({"seed": 9}).encode()):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "setting.json").write_bytes(damage)
        run.prepare(tmp_path, Setting())
        assert not (tmp_path / "logs").exists() and (tmp_path / "own.txt").exists()
    (tmp_path / "result.json").write_text("")
    run.prepare(tmp_path, Setting())
    assert not (tmp_path / "result.json").exists()


def test_a_model_follows_the_data_and_starts_afresh(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    data, full, sx, _, report = run.jobs(tmp_path, Setting())
    assert not (tmp_path / "bin").exists()  # of a run that was stopped
    assert [step.name for step in data.steps] == ["corpus", "preprocess"]
    assert [step.name for step in sx.steps] == ["train", "compact", "generate"]
    assert [step.name for step in full.steps] == ["train", "generate"]
    assert full.after == ("data",) and report.after == ("full", "sx", "vq")
    assert all(step.cwd == tmp_path for job in (data, full, sx) for step in job.steps)


def test_row_of_a_model(tmp_path: Path) -> None:
    """10 symbols, 64 wide: 2,560 bytes. BLEU of what was translated."""
    for name in ("corpus", "full", "logs/full"):
        (tmp_path / name).mkdir(parents=True)
    words = "a b c d e"
    (tmp_path / "corpus" / f"test.{TARGET}").write_text(f"{words}\n{words} f\n")
    weight = {"encoder.embed_tokens.weight": torch.zeros(10, 64), "other": torch.zeros(10)}
    torch.save({"model": weight, "cfg": {"model": {}}}, tmp_path / "full" / "checkpoint_best.pt")
    job = run.jobs(tmp_path, Setting())[1]
    log = job.folder / "generate.log"
    log.write_text(f"D-1\t-1\t{words} f\nS-0\tx\nD-0\t-1\t{words}\nGenerate test\n")
    row = job.finish(job, [{"cpu_seconds": 3.5}])["row"]
    assert (row["bleu"], row["embedding_bytes"], row["model_bytes"]) == (
        pytest.approx(100),
        *(2560, 2600),
    )
    assert (row["cr_measured"], row["model_ratio"], row["train_seconds"]) == (1.0, 1.0, 3.5)
    log.write_text(f"D-0\t-1\t{words}\n")
    with pytest.raises(CheckpointError, match="1 translations, but 2 reference lines"):
        job.finish(job, [{"cpu_seconds": 3.5}])


def test_folder_that_cannot_be_used(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("thesis")
    assert run.main(["--out", str(tmp_path / "file")]) == 2
    assert "is not a folder; give a folder" in capsys.readouterr().err


def test_training_commands_differ_in_dpq_flags_only() -> None:
    full, *others = (" ".join(commands.train(Setting(K=8, D=4), model)) for model in MODELS)
    assert full.count("--dpq") == 1
    full = full.replace("--dpq-full-start 0.5 ", "")
    for method, command in zip(("sx", "vq"), others):
        flags = f"--dpq-K 8 --dpq-D 4 --dpq-method {method} "
        assert command.count(flags) == 1
        rest = command.replace(flags, "")
        rest = rest.replace(f"--save-dir {method}", "--save-dir full")
        assert rest == full


def test_table_shows_every_number() -> None:
    rows = [
        table.Row("full table", 61.25, 1000000, 1.0, 1.0, 2000000, 1.0, 81.4),
        table.Row("DPQ-SX", 60.04, 48000, 21.3, 20.8, 1048000, 1.9084, 84.0),
    ]
    full, small = (line.split() for line in table.render(rows).splitlines()[3:])
    assert " ".join(full) == "full table 61.2 1,000,000 1.0 1.0 2,000,000 1.00 81"
    assert " ".join(small) == "DPQ-SX 60.0 48,000 21.3 20.8 1,048,000 1.91 84"


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
