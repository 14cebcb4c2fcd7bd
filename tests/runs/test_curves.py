"""Curves from fairseq's logs in each format, from damaged ones and from TensorBoard files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.runs.logs import read_curves

STAMP = "2026-11-16 22:18:07 | INFO |"
USE = '"valid_dpq_used": "0.9", "valid_dpq_entropy": "4.2"'
JSON = f"""{STAMP} fairseq_cli.train | {{'loss': 3}}
{STAMP} train_inner | {{"epoch": 1, "loss": "10.5", "ppl": "1448", "num_updates": "50"}}
{STAMP} train_inner | {{"epoch": 1, "loss": "8.5", "ppl": "362", "num_updates": "100"}}
{STAMP} train_inner | {{"epoch": 1, "loss": "8.25", "ppl": "304", "num_updates": "100"}}
{STAMP} valid | {{"epoch": 1, "valid_loss": "7.5", {USE}, "valid_num_updates": "100"}}
{STAMP} train | {{"epoch": 1, "train_loss": "9.9", "train_num_updates": "100"}}
{STAMP} valid | {{"valid_loss": "7.0", "valid_dpq_changed": "0.25", "valid_num_updates": "200"}}
{STAMP} valid | {{"epoch": 2, "valid_loss": "nan", "valid_num_updates": "300"}}
{STAMP} valid | {{"epoch": 2, "valid_loss"
{STAMP} valid | [1, 2]
"""
VALID = "valid on 'valid' subset | loss 7.5 | ppl 181 | num_updates 100 | dpq_entropy 4.2"
SIMPLE = f"""{STAMP} train_inner | epoch 001:  50 / 400 loss=10.5, ppl=1448, num_updates=50
{STAMP} valid | epoch 001 | {VALID}
"""


def _read(folder: Path, text: str) -> dict:
    (folder / "log").write_text(text, encoding="utf-8")
    return read_curves(folder / "log")


def test_json_log(tmp_path: Path) -> None:
    """The last of a repeated update counts, NaN and torn lines are left out."""
    curves = _read(tmp_path, JSON)
    assert curves["train loss"] == [(50, 10.5), (100, 8.25)]
    assert curves["valid loss"] == [(100, 7.5), (200, 7.0)]
    assert curves["valid dpq_entropy"] == [(100, 4.2)]
    assert curves["valid dpq_changed"] == [(200, 0.25)]


def test_simple_log(tmp_path: Path) -> None:
    curves = _read(tmp_path, SIMPLE)
    assert curves["train loss"] == [(50, 10.5)] and curves["train ppl"] == [(50, 1448)]
    assert curves["valid loss"] == [(100, 7.5)] and curves["valid dpq_entropy"] == [(100, 4.2)]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no line of fairseq's training log"):
        _read(tmp_path, "hello\n\0\n")
    with pytest.raises(CheckpointError, match="cannot read --log"):
        read_curves(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no TensorBoard file"):
        (tmp_path / "empty").mkdir()
        pytest.importorskip("tensorboard")
        read_curves(tmp_path / "empty")


def test_tensorboard_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for split, value in (("train_inner", 3.5), ("train", 9.0), ("valid", 2.5)):
        writer = SummaryWriter(str(tmp_path / split))
        writer.add_scalar("loss", value, 10)
        writer.add_scalar("loss", value - 1, 15 if split == "train" else 20)
        writer.add_scalar("wps", 7, 10)
        writer.close()
    assert read_curves(tmp_path) == {
        "train loss": [(10, 3.5), (20, 2.5)],
        "valid loss": [(10, 2.5), (20, 1.5)],
    }
