"""Two real gloo processes train like one process that takes their batches in turn."""

from __future__ import annotations

import re
from pathlib import Path

import fairseq
import pytest
import torch

from helpers import fsq
from helpers.plugin_runs import RUN, TRANSFORMER, last

pytestmark = pytest.mark.slow

TIED = [*TRANSFORMER, "--share-decoder-input-output-embed", "--dropout", "0", "--seed", "5"]
VQ = "--dpq-K 8 --dpq-D 4 --dpq-embeddings all --dpq-method vq "
KD = "--dpq-K 8 --dpq-D 5 --dpq-code-width 12 --dpq-embeddings all --dpq-method kd_codes"
# 0.12.2 has parameters that only inference uses, which pytorch_ddp must be told of.
NEEDED = ["--find-unused-parameters"] if fairseq.__version__ == "0.12.2" else []

# Each worker writes its own state at the end; the plugin is imported as fairseq-train does it.
WORKER = """
import faulthandler, gc, os, sys, torch
faulthandler.dump_traceback_later(200, exit=True)  # says where a worker hangs
from fairseq_cli import train
from fairseq import trainer
old, where = trainer.Trainer.train_step, sys.argv[1]
def step(self, *args, **kwargs):
    out = old(self, *args, **kwargs)
    state = self.model.state_dict()
    # fairseq 0.12.2 has a tensor that it never initialises
    state = {k: v.clone() for k, v in state.items() if not k.endswith("._float_tensor")}
    torch.save(state, os.path.join(where, f"rank{os.environ.get('RANK', 0)}.pt"))
    return out
trainer.Trainer.train_step = step
sys.argv = ["fairseq-train"] + sys.argv[2:]
train.cli_main()
from fairseq.distributed.utils import get_global_group
from torch.nn.parallel import DistributedDataParallel
assert not vars(get_global_group), "its threads may end this process with an error"
models = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
assert not models, "the last to hold the group: this process may hang"
"""


def run(
    corpus: Path,
    where: Path,
    dpq: str,
    *flags: str,
    workers: int,
    updates: int = 4,
    model: list[str] = TIED,
) -> str:
    where.mkdir(parents=True)
    (where / "worker.py").write_text(WORKER)
    argv = [where / "worker.py", where, corpus, "--user-dir", fsq.USER_DIR, *RUN, *model]
    argv += ["--save-dir", where, "--max-update", str(updates), *dpq.split(), *flags]
    argv += NEEDED if "legacy_ddp" not in flags else []
    if workers == 1:
        done = fsq.run(["python", *argv])
    else:
        start = ["--nproc_per_node", str(workers), "--master_port", fsq.free_port()]
        done = fsq.run(["torchrun", *start, *argv])
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("dpq", "backend"),
    [
        ("--dpq-K 8 --dpq-D 4 --dpq-embeddings all", "legacy_ddp"),
        (VQ, "pytorch_ddp"),
        (VQ + "--dpq-schedule warmup --dpq-ema-decay 0.9", "legacy_ddp"),
        (KD, "legacy_ddp"),
    ],
)
def test_two_workers_equal_one_with_update_freq_2(corpus, tmp_path, dpq, backend) -> None:
    # As many sentences in each batch as fill whole batches: no worker is left without one.
    flags = ["--batch-size", "10", "--clip-norm", "1", "--optimizer", "sgd", "--lr", "0.05"]
    two = run(corpus, tmp_path / "two", dpq, *flags, "--ddp-backend", backend, workers=2)
    one = run(corpus, tmp_path / "one", dpq, *flags, "--update-freq", "2", workers=1)

    a, b = (torch.load(tmp_path / "two" / f"rank{r}.pt") for r in (0, 1))
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key  # parameters, statistics and EMA, bit for bit
    single = torch.load(tmp_path / "one" / "rank0.pt")
    for key in single:
        torch.testing.assert_close(a[key], single[key], rtol=2e-4, atol=2e-6, msg=key)
    loss = [fsq.logged(text, r"train_inner \| .*? loss") for text in (two, one)]
    assert len(loss[0]) == len(loss[1]) == 4
    torch.testing.assert_close(*map(torch.tensor, loss), rtol=0, atol=2e-3)
    updates = [
        key for key in single if key.startswith("encoder.embed_tokens") and "_updates" in key
    ]
    assert [single[key].item() for key in updates] == [4] * len(updates)
    assert bool(updates) == ("warmup" not in dpq)


def test_two_workers_classify_like_one(sentences, tmp_path) -> None:
    """The batch norm of the classifier follows both workers' documents too."""
    flags = ["--task", "text_classification", "--arch", "text_classifier", "--batch-size", "10"]
    flags += ["--criterion", "sentence_prediction", "--encoder-embed-dim", "32", "--dropout", "0"]
    flags += ["--optimizer", "lazy_adam", "--lr", "0.003"]
    dpq = "--dpq-K 8 --dpq-D 4 --dpq-method vq"
    run(sentences, tmp_path / "two", dpq, workers=2, model=flags)
    run(sentences, tmp_path / "one", dpq, "--update-freq", "2", workers=1, model=flags)
    a, b = (torch.load(tmp_path / "two" / f"rank{r}.pt") for r in (0, 1))
    single = torch.load(tmp_path / "one" / "rank0.pt")
    assert a.keys() == b.keys() == single.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key
        torch.testing.assert_close(a[key], single[key], rtol=2e-4, atol=2e-6, msg=key)
    head = "classification_heads.sentence_classification_head.norm1"
    assert single[f"{head}.updates"].item() == 4 and single[f"{head}.running_mean"].any()


def test_find_unused_parameters_finds_the_centroids(corpus, tmp_path) -> None:
    """Their gradient comes from the regulariser alone, which DDP does not see in the output."""
    flags = ["--ddp-backend", "pytorch_ddp", "--find-unused-parameters"]
    run(corpus, tmp_path / "two", VQ, *flags, workers=2, updates=2)
    a, b = (torch.load(tmp_path / "two" / f"rank{r}.pt") for r in (0, 1))
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp"])
def test_workers_stay_identical_with_data_dependent_starts(corpus, tmp_path, backend) -> None:
    """k-means start and re-seeding look at each worker's own batches, yet all end alike, also
    where one worker gets a dummy batch at the end of an epoch."""
    dpq = VQ + "--dpq-K 24 --dpq-warmup-updates 2 --dpq-reseed-after 2"
    flags = ["--ddp-backend", backend, "--batch-size", "8"]
    text = run(corpus, tmp_path / "two", dpq, *flags, workers=2, updates=9)
    a, b = (torch.load(tmp_path / "two" / f"rank{r}.pt") for r in (0, 1))
    for key in a:
        assert torch.equal(a[key], b[key]), key
    assert a["encoder.embed_tokens.schedule"].tolist()[:2] == [9, 2]
    assert "epoch 002" in text  # 15 batches of 8: the second worker's last one is a dummy
    assert last(tmp_path / "two")["optimizer_history"][-1]["num_updates"] == 9


def test_resume_with_two_workers(corpus, tmp_path) -> None:
    """Plain torchrun on a CPU, stopped and resumed: rank 1 loads what rank 0 sends it."""
    where = tmp_path / "two"
    run(corpus, where, VQ, workers=2, updates=2)
    (where / "worker.py").unlink()
    argv = [corpus, "--user-dir", fsq.USER_DIR, *TIED, *RUN, "--save-dir", where, *VQ.split()]
    argv += NEEDED
    start = ["--nproc_per_node", "2", "--master_port", fsq.free_port()]
    done = fsq.run(
        ["torchrun", *start, "--no_python", fsq.script("fairseq-train"), *argv, "--max-update", "3"]
    )
    text = done.stdout + done.stderr
    assert "(epoch 1 @ 2 updates)" in text
    assert len(re.findall(r"training on 2 devices", text)) >= 1
    assert last(where)["optimizer_history"][-1]["num_updates"] == 3
