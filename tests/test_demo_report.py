"""The report at the end of the demo: three models, by the command that it names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import compact
from fairseq_dpq.cli import report as tool
from fairseq_dpq.demo import report
from fairseq_dpq.demo.commands import MODELS
from helpers.report_files import dictionary, full
from helpers.toy_checkpoints import make_layer, make_state

pytest.importorskip("matplotlib")

LOG = '2026 | INFO | valid | {"valid_loss": "2.5", "valid_num_updates": "10"}\n'


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """What the demo leaves, in small: checkpoints that name the folder bin, and logs."""
    for name in ("bin", "logs", *(model.folder for model in MODELS)):
        (tmp_path / name).mkdir()
    dictionary(tmp_path / "bin" / "dict.txt", [f"w{i}" for i in range(56)])
    for model in MODELS:
        (tmp_path / "logs" / f"train-{model.folder}.log").write_text(LOG)
        path = tmp_path / model.folder / "checkpoint_best.pt"
        if model.method is None:
            state = torch.load(full(path, torch.randn(60, 12)), weights_only=False)
        else:
            state = make_state(make_layer(method=model.method))
        state["cfg"]["task"] = {"data": "bin"}
        torch.save(state, path)
        if model.method is not None:
            assert compact.main([str(path), str(path.with_name("compact.pt"))]) == 0
    return tmp_path


def test_report_of_the_three_models(out: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    line = report.write(out)
    assert line.endswith(f" s: {out / 'report' / 'report.html'}")
    facts = json.loads((out / "report" / "report.json").read_text())
    assert [model["name"] for model in facts["models"]] == [model.title for model in MODELS]
    assert [bool(model["sizes"].get("compact_file_bytes")) for model in facts["models"]] == [
        False,
        True,
        True,
    ]
    assert list(facts["curves"]) == [model.title for model in MODELS] and facts["notes"] == []
    (command,) = (out / "commands.txt").read_text().splitlines()
    monkeypatch.chdir(out)
    assert tool.main([*shlex.split(command)[1:], "--force"]) == 0
    again = json.loads((out / "report" / "report.json").read_text())
    assert again["words"] == facts["words"] and again["curves"] == facts["curves"]


def test_demo_does_not_fail_with_its_report(out: Path) -> None:
    (out / "sx" / "checkpoint_best.pt").write_bytes(b"")
    assert report.write(out).startswith("no report: ")
    assert not (out / "report").exists()
