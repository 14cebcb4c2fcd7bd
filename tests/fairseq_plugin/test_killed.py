"""Training that is killed and resumed ends with the bits of the run that was not.

All updates lie in the first epoch: resumed in a later one, fairseq itself, with full tables too,
goes on with other batches than the run that was not stopped.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from fairseq.trainer import Trainer

from helpers import fsq
from helpers.plugin_runs import RUN, TRANSFORMER
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow

UPDATES = 9
METHODS = {
    "sx": "--dpq-K 8 --dpq-D 4 --dpq-embeddings all",
    "vq": "--dpq-K 8 --dpq-D 4 --dpq-method vq",
    "ema": "--dpq-K 8 --dpq-D 4 --dpq-method vq --dpq-ema-decay 0.9 --dpq-reseed-after 3",
    "kmeans": "--dpq-K 8 --dpq-D 4 --dpq-kmeans-init 4",
}
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


def train(corpus: Path, where: Path, dpq: str, stop: tuple[int, int] | None = None) -> int:
    """fairseq-train in a child; with `stop`, (update, signal), it gets the signal in the middle of
    that update. The status of the child."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        torch.set_num_threads(1)
        old = Trainer.train_step

        def step(self, *args, **kwargs):
            if stop is not None and self.get_num_updates() + 1 == stop[0]:
                os.kill(os.getpid(), stop[1])
            return old(self, *args, **kwargs)

        Trainer.train_step = step  # type: ignore[method-assign]
        argv = [corpus, "--user-dir", fsq.USER_DIR, "--save-dir", where, *RUN, *TRANSFORMER]
        argv += ["--max-update", UPDATES, "--save-interval-updates", 2, "--disable-validation"]
        argv += ["--keep-interval-updates", 1, "--batch-size", 8, "--seed", 3, *dpq.split()]
        fsq.main("train", [str(a) for a in argv])
        code = 0
    except BaseException:
        code = 9
    os._exit(code)


def weights(where: Path) -> dict[str, torch.Tensor]:
    state = load(where / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == UPDATES
    return state["model"]


@pytest.mark.parametrize("name", METHODS)
def test_killed_and_resumed(corpus, tmp_path, name) -> None:
    dpq = METHODS[name]
    assert train(corpus, tmp_path / "whole", dpq) == 0
    whole = weights(tmp_path / "whole")
    where = tmp_path / "killed"
    for update, number in zip((1, 3, 4, 6, 9), [*SIGNALS, *SIGNALS]):
        status = train(corpus, where, dpq, (update, number))
        assert status != 0
    assert train(corpus, where, dpq) == 0
    resumed = weights(where)
    assert resumed.keys() == whole.keys()
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key


def test_a_disk_that_fills_leaves_the_last_checkpoint_good(corpus, tmp_path) -> None:
    """A limit on file sizes stands in for the full disk."""
    dpq = METHODS["sx"]
    assert train(corpus, tmp_path / "whole", dpq) == 0
    whole = weights(tmp_path / "whole")
    where = tmp_path / "full"
    assert train(corpus, where, dpq, (6, signal.SIGKILL)) != 0
    good = (where / "checkpoint_last.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, limits[1]))
    try:
        train(corpus, where, dpq)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (where / "checkpoint_last.pt").read_bytes() == good
    assert train(corpus, where, dpq) == 0
    for key, tensor in whole.items():
        assert torch.equal(weights(where)[key], tensor), key
    shutil.rmtree(where)
