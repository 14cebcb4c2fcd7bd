"""fairseq-dpq-sweep with fairseq's own training: sizes, scores, and a sweep that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_dpq.cli import sweep
from helpers import fsq
from helpers.plugin_runs import TRANSFORMER

pytestmark = pytest.mark.slow

FLAGS = [
    *("--cpu", "--optimizer", "adam", "--lr", "5e-3", "--num-workers", "0", "--batch-size", "8"),
    *("--max-update", "8", "--log-interval", "1", "--save-interval-updates", "2", "--seed", "3"),
    *("--dropout", "0.1", "--required-batch-size-multiple", "1"),
]


def _words(corpus: Path, out: Path, *grid: str) -> list[str]:
    train = ["fairseq-train", str(corpus), "--user-dir", fsq.USER_DIR, *TRANSFORMER, *FLAGS]
    return ["--out", str(out), "--threads", "1", *grid, "--", *train]


def _results(out: Path) -> dict[str, dict]:
    lines = (out / "results.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


def test_sizes_and_scores_of_real_runs_and_resume_after_a_kill(
    corpus: Path, tmp_path: Path
) -> None:
    """72 x 32 floats are 9,216 bytes; K = 4, D = 8 takes 2 bytes a row, 4 x 32 values and the
    checksum. 5 does not divide 32. A killed sweep ends with the score of the one that was not."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    grid = ["--dpq-K", "4", "--dpq-D", "8", "--dpq-method", "vq"]
    words = _words(corpus, killed, *grid, "--no-full")
    process = subprocess.Popen(
        [sys.executable, "-m", "fairseq_dpq.cli.sweep", *words], stderr=subprocess.DEVNULL
    )
    last = killed / "runs/vq-K4-D8/checkpoints/checkpoint_last.pt"
    end = time.monotonic() + 240
    while not last.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()

    grid.insert(4, "5")
    assert sweep.main(_words(corpus, whole, *grid)) == 1
    rows = _results(whole)
    assert rows["vq-K4-D5"]["status"] == "failed"
    assert "--dpq-D 5 does not divide --encoder-embed-dim 32" in rows["vq-K4-D5"]["error"]
    coded = rows["vq-K4-D8"]
    symbols = len((corpus / "dict.src.txt").read_text().splitlines()) + 4
    assert coded["full_bytes"] == rows["full"]["bytes"] == 4 * 32 * symbols
    assert coded["bytes"] == 2 * symbols + 4 * 4 * 32
    assert coded["ratio"] == coded["full_bytes"] / coded["bytes"]
    assert (coded["updates"], coded["attempts"], rows["full"]["updates"]) == (8, 1, 8)
    assert coded["scores"]["ppl"] == pytest.approx(2 ** coded["scores"]["loss"], rel=2e-3)

    # fairseq does one more update if it is started again after the last one.
    over = "done training" in (killed / "runs/vq-K4-D8/train.log").read_text()
    assert sweep.main(["--out", str(killed), "--resume"]) == 0
    again = _results(killed)["vq-K4-D8"]
    assert again["attempts"] == 2
    if over:
        assert again["updates"] == coded["updates"] + 1
    else:
        assert again["scores"] == coded["scores"]
