"""What a sweep reads from logs, and how it compares results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fairseq_dpq.runs.folder import RunsError
from fairseq_dpq.runs.logs import ATTEMPT, RunLog, lower_is_better
from fairseq_dpq.sweeps.results import (
    LINES,
    Result,
    choose_metric,
    front,
    read_results,
    with_full_sizes,
)

LOG = (
    f"{ATTEMPT} 1\n"
    "x | INFO | fairseq_cli.train | {'optimization': {'max_epoch': 4, 'max_update': 400}}\n"
    'x | INFO | train_inner | {"epoch": 1, "update": 0.5, "num_updates": "50", "gb_free": "9.5"}\n'
    'x | INFO | valid | {"epoch": 1, "valid_loss": "3.0", "valid_ppl": "8.0", "valid_bleu": "10", '
    '"valid_wps": "900", "valid_dpq_used": "1", "valid_num_updates": "100"}\n'
    'x | INFO | valid | {"epoch": 2, "valid_loss": "2.0", "valid_ppl": "4.0", "valid_bleu": "30", '
    '"valid_num_updates": "200", "valid_best_loss": "2.0"}\n'
    'x | INFO | valid | {"epoch": 3, "valid_loss": "2.5", "valid_ppl": "nan", "valid_bleu": "20", '
    '"valid_num_updates": "300", "valid_best_loss": "2.0"}\n'
)


def _log(tmp_path: Path, text: str) -> RunLog:
    path = tmp_path / "train.log"
    path.write_text(text)
    log = RunLog(path)
    log.read()
    return log


def test_best_of_each_metric(tmp_path: Path) -> None:
    """Low loss and perplexity, high BLEU; not a number and speeds do not count."""
    log = _log(tmp_path, LOG)
    assert log.best() == {"loss": 2.0, "ppl": 4.0, "bleu": 30.0}
    assert log.best(after=200) == {"loss": 2.5, "bleu": 20.0}
    assert (log.attempts, log.max_update, log.updates, log.gpu_gb_free) == (1, 400, 300, 9.5)
    assert [lower_is_better(m) for m in ("nll_loss", "ppl", "bleu", "accuracy")] == [1, 1, 0, 0]


def test_log_grows_and_is_resumed(tmp_path: Path) -> None:
    """A half-written line waits for its end; a validation that is repeated counts once."""
    log = _log(tmp_path, LOG[:-30])
    assert sorted(log.valid) == [100, 200] and log.progress() == 200 / 400
    log.path.write_text(LOG + f"{ATTEMPT} 2\n" + LOG.splitlines()[4].replace("30", "31") + "\n")
    log.read()
    assert sorted(log.valid) == [100, 200, 300] and log.attempts == 2
    assert log.valid[200]["bleu"] == 31
    with log.path.open("a") as file:
        file.write("x | INFO | fairseq_cli.train | done training in 9.0 seconds\n")
    log.read()
    assert log.finished and log.progress() == 1.0
    assert log.last_line == "x | INFO | fairseq_cli.train | done training in 9.0 seconds"


def _run(name: str, size: int, ppl: float, **more: object) -> Result:
    values = {"method": "sx", "bytes": size, "scores": {"ppl": ppl, "bleu": 100 - ppl}, **more}
    return Result(name, **values)  # type: ignore[arg-type]


def test_front_by_hand() -> None:
    runs = [
        *(_run("a", 100, 9.0), _run("b", 100, 8.0), _run("c", 200, 8.5), _run("d", 300, 7.0)),
        *(_run("e", 400, 7.0), _run("f", 50, 1.0, status="failed"), _run("g", 500, 6.0)),
        Result("full", bytes=10, scores={"ppl": 1.0}),  # without a method
    ]
    assert [r.name for r in front(runs, "ppl")] == ["b", "d", "g"]
    assert [r.name for r in front(runs, "bleu")] == ["b", "d", "g"]


def test_full_table_takes_what_the_others_replace() -> None:
    full, coded = Result("full"), _run("a", 50, 9.0, full_bytes=1000)
    with_full_sizes([full, coded])
    assert (full.bytes, full.ratio, coded.bytes) == (1000, 1.0, 50)


def test_cost_of_an_update() -> None:
    """CPU time without a GPU, wall time with one, unknown of a resumed run."""
    run = Result("a", updates=50, seconds=100.0, cpu_seconds=20.0)
    assert run.seconds_per_update() == 0.4
    run.gpu_gb_free = 3.0
    assert run.seconds_per_update() == 2.0
    run.attempts = 2
    assert run.seconds_per_update() is None


def test_metric() -> None:
    runs = [_run("a", 1, 2.0)]
    assert choose_metric(runs, None) == "ppl"
    assert choose_metric([Result("a", scores={"accuracy": 1.0})], None) == "accuracy"
    assert choose_metric(runs, "bleu") == "bleu"
    with pytest.raises(RunsError, match="--metric wer: the runs have bleu, ppl; a BLEU score"):
        choose_metric(runs, "wer")


def test_lines_are_read_back(tmp_path: Path) -> None:
    run = _run("a", 50, 9.0, full_bytes=1000, K=8, D=4)
    newer = {**asdict(run), "of_a_newer_version": 1}
    (tmp_path / LINES).write_text(json.dumps(newer) + "\n")
    assert read_results(tmp_path) == [run]
    damaged = [b"{", b"[]\n", b"3\n", b"\xff\xfe", b'{"name": 3}', b'{"name": "a", "scores": 7}']
    damaged += [b'{"name": "a", "scores": {"ppl": "x"}}', b'{"K": 4}', b"[" * 100_000]
    for text in damaged:
        (tmp_path / LINES).write_bytes(text)
        with pytest.raises(RunsError, match="is damaged"):
            read_results(tmp_path)
    with pytest.raises(RunsError, match="it is not the --out of a sweep"):
        read_results(tmp_path / "none")
