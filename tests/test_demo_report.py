"""The report at the end of the demo: three models, by the command that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.demo.commands import MODELS, report
from fairseq_dpq.cli import compact
from fairseq_dpq.cli import report as tool
from helpers.report_files import dictionary, full
from helpers.toy_checkpoints import load, make_layer, make_state

pytest.importorskip("matplotlib")

LOG = '2026 | INFO | valid | {"valid_loss": "2.5", "valid_num_updates": "10"}\n'


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """What the demo leaves, in small: checkpoints that name the folder bin, and logs."""
    for name in ("bin", *(f"{top}{m.folder}" for m in MODELS for top in ("", "logs/"))):
        (tmp_path / name).mkdir(parents=True)
    dictionary(tmp_path / "bin" / "dict.txt", ["horse", *(f"w{i}" for i in range(55))])
    for model in MODELS:
        (tmp_path / "logs" / model.folder / "train.log").write_text(LOG)
        path = tmp_path / model.folder / "checkpoint_best.pt"
        if model.method is None:
            state = load(full(path, torch.randn(60, 12)))
        else:
            state = make_state(make_layer(method=model.method))
        state["cfg"]["task"] = {"data": "bin"}
        torch.save(state, path)
        if model.method is not None:
            assert compact.main([str(path), str(path.with_name("compact.pt"))]) == 0
    return tmp_path


def test_report_of_the_three_models(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out)
    assert tool.main(report()[1:]) == 0
    facts = json.loads((out / "report" / "report.json").read_text())
    assert [model["name"] for model in facts["models"]] == [model.title for model in MODELS]
    assert [bool(model["sizes"].get("compact_file_bytes")) for model in facts["models"]] == [
        False,
        True,
        True,
    ]
    assert list(facts["curves"]) == [model.title for model in MODELS]
    assert facts["notes"][0] == "no table has the symbol house"
