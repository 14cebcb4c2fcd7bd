"""Restoring checkpoints: the same options or an error with both; starting from full tables."""

from __future__ import annotations

import shutil

import pytest
import torch

from fairseq_dpq import DPQEmbedding
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.layers import FairseqDPQEmbedding
from fairseq_dpq.fairseq_plugin.options import PluginOptions
from fairseq_dpq.fairseq_plugin.resume import check_restore
from fairseq_dpq.files.record import RECORD_KEY, Table, TablesRecord
from fairseq_dpq.methods.base import TableUse
from helpers import fsq
from helpers.plugin_runs import TRANSFORMER, last, train

pytestmark = pytest.mark.slow

SX = "--dpq-K 8 --dpq-D 4 --dpq-embeddings all"
TIED = [*TRANSFORMER, "--share-decoder-input-output-embed"]


@pytest.fixture(scope="module")
def full(corpus, tmp_path_factory):
    where = tmp_path_factory.mktemp("full")
    train(corpus, where, *TIED, updates=8)
    return where / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def dpq(corpus, tmp_path_factory):
    where = tmp_path_factory.mktemp("dpq")
    train(corpus, where, *TIED, updates=2, dpq=SX)
    return where / "checkpoint_last.pt"


def resume(corpus, tmp_path, checkpoint, dpq: str, *flags: str) -> str:
    tmp_path.mkdir(exist_ok=True)
    shutil.copy(checkpoint, tmp_path / "checkpoint_last.pt")
    return train(corpus, tmp_path, *TIED, *flags, updates=4, dpq=dpq)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "",
            r"has no DPQ options\. Add --dpq-K 8 --dpq-D 4 --dpq-method sx --dpq-embeddings all$",
        ),
        (
            "--dpq-K 16 --dpq-D 4 --dpq-embeddings all",
            r"--dpq-K 8 in the checkpoint, 16 here\. .*\(--dpq-K 8 --dpq-D 4 --dpq-method sx "
            r"--dpq-embeddings all\), use another --save-dir$",
        ),
        (
            SX + " --dpq-tau 2",
            r"--dpq-tau 1.0 in the checkpoint, 2.0 here\. .*or .* --reset-optimizer$",
        ),
        (
            SX + " --dpq-schedule warmup",
            r"--dpq-schedule paper in the checkpoint, warmup here.* use another --save-dir$",
        ),
        (SX + " --dpq-share-subspaces", r"--dpq-share-subspaces False in the checkpoint, True"),
        (
            "--dpq-K 8 --dpq-D 4",
            r"tables at decoder.embed_tokens, encoder.embed_tokens; .* at encoder.embed_tokens\. "
            r".*: --dpq-K 8 --dpq-D 4 --dpq-method sx --dpq-embeddings all$",
        ),
    ],
)
def test_other_or_forgotten_options(corpus, dpq, tmp_path, options, message) -> None:
    with pytest.raises(DPQConfigError, match=message):
        resume(corpus, tmp_path, dpq, options)


def test_flags_to_paste_are_all_that_were_given() -> None:
    """Resume checks a checkpoint against a command; no training is needed to see its text."""
    own = {"K": 8, "D": 4, "share_subspaces": True, "ema_decay": 0.9, "warmup_updates": 5}
    given = PluginOptions(method="vq", embeddings="all", decoder_K=16, given=own)
    table = Table(20, 8, 1, given.of_table(False).resolved(TableUse(8)).keywords())
    cfg = {**given.to_keys(), RECORD_KEY: TablesRecord({"encoder.embed_tokens": table}).to_json()}
    with pytest.raises(DPQConfigError) as error:
        check_restore({}, {"cfg": {"model": cfg}}, "x.pt", False)
    assert str(error.value) == (
        "x.pt was trained with DPQ, but this command has no DPQ options. Add --dpq-K 8 --dpq-D 4 "
        "--dpq-method vq --dpq-share-subspaces --dpq-warmup-updates 5 --dpq-ema-decay 0.9 "
        "--dpq-embeddings all --dpq-decoder-K 16"
    )


def test_training_options_may_change_with_a_reset_optimizer(corpus, dpq, tmp_path) -> None:
    log = resume(corpus, tmp_path, dpq, SX + " --dpq-tau 2", "--reset-optimizer")
    assert "Loaded checkpoint" in log


@pytest.mark.parametrize(
    ("method", "option", "buffers"),
    [
        ("sx", "--dpq-reseed-after 3", {"idle"}),
        ("vq", "--dpq-reseed-after 3", {"idle"}),
    ],
)
def test_options_with_state_are_taken_on_and_left_out(corpus, tmp_path, method, option, buffers):
    """What a collapsing run is advised to try can be tried on the run itself, and undone."""
    plain = f"{SX} --dpq-method {method}"
    train(corpus, tmp_path / "plain", *TIED, updates=2, dpq=plain)
    path = "encoder.embed_tokens."
    before = last(tmp_path / "plain")["model"]

    def added(where) -> set:
        state = last(where)["model"]
        return {key[len(path) :] for key in state if key.startswith(path)} - {
            key[len(path) :] for key in before
        }

    checkpoint = tmp_path / "plain" / "checkpoint_last.pt"
    log = resume(corpus, tmp_path / "on", checkpoint, f"{plain} {option}", "--reset-optimizer")
    assert "Loaded checkpoint" in log
    assert added(tmp_path / "on") == buffers
    checkpoint = tmp_path / "on" / "checkpoint_last.pt"
    log = resume(corpus, tmp_path / "off", checkpoint, plain, "--reset-optimizer")
    assert "Loaded checkpoint" in log
    assert added(tmp_path / "off") == set()


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_added_averages_begin_at_the_trained_keys(method) -> None:
    torch.manual_seed(0)
    own = {"K": 4, "D": 2, "method": method, "schedule": "warmup"}
    old = FairseqDPQEmbedding(20, 8, 1, **own)
    state = {f"embed.{k}": t for k, t in old.state_dict().items() if not k.startswith("ema_")}
    layer = FairseqDPQEmbedding(20, 8, 1, **own)
    layer.upgrade_state_dict_named(state, "embed")
    layer.load_state_dict({key[len("embed.") :]: tensor for key, tensor in state.items()})
    assert torch.equal(layer.ema_sum / layer.ema_count.unsqueeze(-1), old.codebook().keys)


def test_statistics_that_codes_depend_on_cannot_be_added() -> None:
    layer = FairseqDPQEmbedding(20, 8, 1, K=4, D=2, schedule="paper")
    state = {f"embed.{key}": tensor for key, tensor in layer.state_dict().items()}
    del state["embed.norm_mean"]
    layer.upgrade_state_dict_named(state, "embed")
    with pytest.raises(RuntimeError, match="norm_mean"):
        layer.load_state_dict({key[len("embed.") :]: tensor for key, tensor in state.items()})


def test_full_tables_need_an_explicit_flag(corpus, full, tmp_path) -> None:
    with pytest.raises(DPQConfigError, match=r"full tables.*--finetune-from-model"):
        resume(corpus, tmp_path, full, SX)


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_a_full_model_is_fine_tuned_into_a_dpq_model(corpus, full, tmp_path, method) -> None:
    """With a K that loses little, the first losses are the full model's, not a new model's."""
    options = f"--dpq-K 32 --dpq-D 16 --dpq-embeddings all --dpq-method {method}"
    flags = [*TIED, "--finetune-from-model", str(full)]
    log = train(corpus, tmp_path / "ft", *flags, updates=1, dpq=options)
    new = train(corpus, tmp_path / "new", *TIED, updates=1, dpq=options)

    def first_loss(text: str) -> float:
        return fsq.logged(text, r"train_inner \| .*? loss")[0]

    again = train(corpus, tmp_path / "full", *TIED, "--finetune-from-model", str(full), updates=1)
    assert abs(first_loss(log) - first_loss(again)) < 0.25 * abs(
        first_loss(new) - first_loss(again)
    )
    assert not [key for key in last(tmp_path / "ft")["model"] if key.endswith("tokens.weight")]


@pytest.mark.parametrize("limit", [["--max-epoch", "9"], ["--max-update", "24"]])
def test_fine_tuning_begins_at_the_full_table(corpus, full, tmp_path, limit) -> None:
    """The first loss is the full model's; then the ramp, as long as the training has it."""
    flags = [*TIED, "--finetune-from-model", str(full), "--update-freq", "3", "--dropout", "0"]
    dpq = "--dpq-K 4 --dpq-D 4 --dpq-embeddings all --dpq-method vq --dpq-commitment 0"
    log = train(corpus, tmp_path / "dpq", *flags, *limit, updates=0, dpq=dpq)
    same = train(corpus, tmp_path / "full", *flags, updates=1)
    # One update has no room for a ramp.
    worse = train(corpus, tmp_path / "quantised", *flags, updates=1, dpq=dpq)
    first, full_loss, other = (
        fsq.logged(text, r"train_inner \| .*? loss")[0] for text in (log, same, worse)
    )
    # The padding row too is that of the full table, where an output layer learns it.
    assert abs(first - full_loss) < 0.001 < other - full_loss
    assert "is the start instead of a warm-up" in log
    done = int(last(tmp_path / "dpq")["last_optimizer_state"]["state"][0]["step"])
    state = last(tmp_path / "dpq")["model"]["encoder.embed_tokens.schedule"].tolist()
    assert done >= 16 and state == [done // 8 + done, done // 8, done // 8 + done // 2]


def test_start_from_a_full_table_is_near_it() -> None:
    torch.manual_seed(0)
    table = torch.randn(200, 32)
    layer = FairseqDPQEmbedding(200, 32, 1, K=64, D=16, schedule="warmup")
    state = {"embed.weight": table}
    layer.upgrade_state_dict_named(state, "embed")
    layer.load_state_dict({k[len("embed.") :]: v for k, v in state.items()})
    layer.eval()
    error = (layer(torch.arange(2, 200)) - table[2:]).pow(2).sum() / table[2:].pow(2).sum()
    assert error < 0.05


def test_pretrained_vectors_start_a_table(corpus, tmp_path) -> None:
    words = [line.split()[0] for line in (corpus / "dict.src.txt").read_text().splitlines()]
    torch.manual_seed(1)
    vectors = torch.randn(len(words), 32) * 3
    text = "\n".join(f"{w} " + " ".join(f"{x:.5f}" for x in v) for w, v in zip(words, vectors))
    (tmp_path / "vec.txt").write_text(f"{len(words)} 32\n{text}\n")
    flags = [*TRANSFORMER, "--encoder-embed-path", str(tmp_path / "vec.txt"), "--lr", "1e-30"]
    train(
        corpus,
        tmp_path / "ck",
        *flags,
        updates=1,
        dpq="--dpq-K 32 --dpq-D 16 --dpq-method vq --dpq-ema-decay 0.999999",
    )
    query = last(tmp_path / "ck")["model"]["encoder.embed_tokens.query"]
    torch.testing.assert_close(query[4:], vectors, atol=1e-4, rtol=0)
    values = last(tmp_path / "ck")["model"]["encoder.embed_tokens.values"]
    start = DPQEmbedding.from_pretrained(query, 1, K=32, D=16, method="vq")
    torch.testing.assert_close(values, start.values.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("updates", [0, 100000])
def test_the_warmup_follows_the_number_of_epochs(corpus, tmp_path, updates) -> None:
    """The checkpoint has the numbers, and a longer training keeps them."""
    flags = [*TIED, "--update-freq", "3"]
    log = train(corpus, tmp_path, *flags, "--max-epoch", "9", updates=updates, dpq=SX)
    done = last(tmp_path)["last_optimizer_state"]["state"][0]["step"]
    # The encoder's table, and the decoder's, which is tied to the output.
    for path, share in (("encoder.embed_tokens", 8), ("decoder.embed_tokens", 4)):
        assert log.count(f"{path}: plain until update {int(done) // share}, then k-means") == 1
    assert int(done) >= 16
    assert "no warm-up" not in log
    state = last(tmp_path)["model"]["encoder.embed_tokens.schedule"]
    assert state.tolist() == [done, done // 8, done // 8 + done // 2]
    resumed = train(corpus, tmp_path, *flags, "--max-epoch", "10", updates=updates, dpq=SX)
    assert f"plain until update {int(done) // 8}, then" in resumed
    after = last(tmp_path)["model"]["encoder.embed_tokens.schedule"]
    assert after[0] > done and after[1:].tolist() == state[1:].tolist()
