"""Training that is killed and resumed ends with the bits of the run that was not.

All updates lie in the first epoch: resumed in a later one, fairseq itself, with full tables too,
goes on with other batches than the run that was not stopped.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import fairseq
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from fairseq_dpq.config import DPQConfigError
from helpers import fsq
from helpers.plugin_runs import RUN, TRANSFORMER
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow

UPDATES = 9
METHODS = {
    "sx": "--dpq-K 8 --dpq-D 4 --dpq-embeddings all",
    "vq": "--dpq-K 8 --dpq-D 4 --dpq-method vq",
    "ema": "--dpq-K 8 --dpq-D 4 --dpq-method vq --dpq-ema-decay 0.9 --dpq-reseed-after 3",
    "paper": "--dpq-K 8 --dpq-D 4 --dpq-schedule paper",
}
WARM_UP = "--dpq-K 8 --dpq-D 4 --dpq-embeddings all --dpq-warmup-updates 3 --dpq-ramp-updates 3"
# Twenty batches: each of two workers has ten, so that its nine updates lie in one epoch.
TWO = f"{WARM_UP} --batch-size 6 " + (
    # 0.12.2 has parameters that only inference uses, which pytorch_ddp must be told of.
    "--find-unused-parameters" if fairseq.__version__ == "0.12.2" else ""
)
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


def arguments(corpus: Path, where: Path, dpq: str) -> list[str]:
    argv = [corpus, "--user-dir", fsq.USER_DIR, "--save-dir", where, *RUN, *TRANSFORMER]
    argv += ["--max-update", UPDATES, "--save-interval-updates", 2, "--disable-validation"]
    argv += ["--keep-interval-updates", 1, "--batch-size", 8, "--seed", 3, *dpq.split()]
    return [str(a) for a in argv]


def train(corpus: Path, where: Path, dpq: str, stop: tuple[int, int] | None = None) -> int:
    """fairseq-train in a child; with `stop`, (update, signal), it gets the signal in the middle of
    that update. The status of the child."""
    return os.waitpid(fork(corpus, where, dpq, stop, {}), 0)[1]


def fork(
    corpus: Path, where: Path, dpq: str, stop: tuple[int, int] | None, environment: dict[str, str]
) -> int:
    """The process of such a child."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        # A shell starts what runs in the background with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        os.environ.update(environment)
        old = Trainer.train_step

        def step(self, *args, **kwargs):
            if stop is not None and self.get_num_updates() + 1 == stop[0]:
                os.kill(os.getpid(), stop[1])
            return old(self, *args, **kwargs)

        Trainer.train_step = step  # type: ignore[method-assign]
        fsq.main("train", arguments(corpus, where, dpq))
        code = 0
    except BaseException:
        code = 9
    os._exit(code)


def train_two(corpus: Path, where: Path, dpq: str, stop: tuple[int, int] | None = None) -> int:
    """The same with two workers, started with the variables that torchrun sets; with `stop`,
    (update, rank), that worker is killed in the middle, and the other one after it. The status of
    the first, or of the other where that is 0."""
    where.mkdir(exist_ok=True)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": fsq.free_port(), "WORLD_SIZE": "2"}
    update, first = stop or (0, 0)
    workers = []
    for rank in (first, 1 - first):
        kill = (update, signal.SIGKILL) if rank == first else None
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        workers.append(fork(corpus, where, dpq, kill, {**shared, **own}))
    status = os.waitpid(workers[0], 0)[1]
    if status:
        os.kill(workers[1], signal.SIGKILL)
    other = os.waitpid(workers[1], 0)[1]
    return status or other


def weights(where: Path) -> dict[str, torch.Tensor]:
    state = load(where / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == UPDATES
    return fsq.learned(state["model"])


@pytest.mark.parametrize("name", METHODS)
def test_killed_and_resumed(corpus, tmp_path, name) -> None:
    dpq = METHODS[name]
    assert train(corpus, tmp_path / "whole", dpq) == 0
    whole = weights(tmp_path / "whole")
    where = tmp_path / "killed"
    for update, number in zip((1, 3, 4, 6, 9), [*SIGNALS, *SIGNALS]):
        status = train(corpus, where, dpq, (update, number))
        assert status != 0
    assert train(corpus, where, dpq, (1, signal.SIGKILL)) == 0  # no first update: it goes on
    resumed = weights(where)
    assert resumed.keys() == whole.keys()
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_two_workers_killed_and_resumed(corpus, tmp_path, method) -> None:
    """Either rank at a random update: first around the end of the warm-up, then later."""
    dpq = f"{TWO} --dpq-method {method}"
    assert train_two(corpus, tmp_path / "whole", dpq) == 0
    whole = weights(tmp_path / "whole")
    assert whole["encoder.embed_tokens.schedule"].tolist() == [UPDATES, 3, 6]
    assert "encoder.embed_tokens.ema_sum" in whole
    assert ("encoder.embed_tokens.keys" in whole) == (method == "sx")
    where = tmp_path / "killed"
    draw = random.Random()
    stops = [(draw.randint(*part), draw.randrange(2)) for part in ((3, 4), (5, 9))]
    for stop in stops:
        assert train_two(corpus, where, dpq, stop) == signal.SIGKILL, stops
    assert train_two(corpus, where, dpq, (1, 0)) == 0, stops  # no first update: it goes on
    resumed = weights(where)
    assert resumed.keys() == whole.keys()
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), (key, stops)


def test_a_disk_that_fills_leaves_the_last_checkpoint_good(corpus, tmp_path) -> None:
    """A limit on file sizes stands in for the full disk. The error is one line."""
    dpq = METHODS["sx"]
    assert train(corpus, tmp_path / "whole", dpq) == 0
    whole = weights(tmp_path / "whole")
    where = tmp_path / "full"
    assert train(corpus, where, dpq, (6, signal.SIGKILL)) != 0
    good = (where / "checkpoint_last.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, limits[1]))
    try:
        done = fsq.run(["fairseq-train", *arguments(corpus, where, dpq)], ok=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = f"fairseq_dpq: error: cannot write {where}/checkpoint_1_6.pt: File too large"
    assert said in done.stderr and "Traceback" not in done.stdout + done.stderr
    assert (where / "checkpoint_last.pt").read_bytes() == good
    assert not list(where.glob("*.tmp"))
    assert train(corpus, where, dpq) == 0
    for key, tensor in whole.items():
        assert torch.equal(weights(where)[key], tensor), key
    shutil.rmtree(where)


def test_a_copy_that_fails_leaves_the_old_checkpoint(tmp_path) -> None:
    """What fairseq copies onto checkpoint_last.pt after it has saved another file."""
    new, last = tmp_path / "checkpoint_1_2.pt", tmp_path / "checkpoint_last.pt"
    new.write_bytes(b"n" * 9000)
    last.write_bytes(b"o" * 8000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(DPQConfigError, match=f"cannot write {last}"):
            PathManager.copy(str(new), str(last), overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert last.read_bytes() == b"o" * 8000
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, last.name]
    assert PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == new.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, last.name]


@pytest.mark.parametrize("failures", [1, 3])
def test_a_save_that_fails_is_tried_again_from_the_start(tmp_path, monkeypatch, failures) -> None:
    """fairseq's second attempt writes behind the first, and the file gets its name. After three the
    old file stays."""
    path, save, tried = tmp_path / "checkpoint_last.pt", torch.save, []
    torch.save({"old": 1}, path)

    def fails(obj, file, *args, **kwargs):
        tried.append(file)
        if len(tried) > failures:
            return save(obj, file, *args, **kwargs)
        file.write(b"a part of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    if failures < 3:
        checkpoint_utils.torch_persistent_save({"new": 1}, str(path))
    else:
        with pytest.raises(DPQConfigError, match=r"checkpoint_last.pt: No space left .* stay"):
            checkpoint_utils.torch_persistent_save({"new": 1}, str(path))
    assert torch.load(path) == ({"new": 1} if failures < 3 else {"old": 1})
    assert os.listdir(tmp_path) == [path.name] and len(tried) == min(failures + 1, 3)
