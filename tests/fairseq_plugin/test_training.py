"""The regulariser is added to the loss of every criterion, once; statistics; the log."""

from __future__ import annotations

import json
import re

import pytest
import torch
from fairseq import metrics
from fairseq.criterions import CRITERION_REGISTRY, FairseqCriterion, register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from fairseq_dpq.config import DPQConfigError
from helpers import fsq
from helpers.plugin_runs import TRANSFORMER, last, parameters, train

pytestmark = pytest.mark.slow

SMALL_DPQ = "--dpq-K 8 --dpq-D 4 --dpq-embeddings all"
VQ = "--dpq-K 8 --dpq-D 4 --dpq-method vq --dpq-schedule paper --seed 3 "


if "foreign_for_test" not in CRITERION_REGISTRY:

    @register_criterion("foreign_for_test")
    class ForeignForTest(FairseqCriterion):
        """A criterion that does not know DPQ: it predicts the log-prob of every target token."""

        def forward(self, model, sample, reduce=True):
            logits, _ = model(**sample["net_input"])
            target = sample["target"].reshape(-1)
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(target.numel(), -1), target, ignore_index=1, reduction="sum"
            )
            size = sample["target"].size(0)
            return loss, size, {"loss": loss.data, "sample_size": size}

        @staticmethod
        def reduce_metrics(logging_outputs) -> None:
            size = sum(log["sample_size"] for log in logging_outputs)
            metrics.log_scalar("loss", sum(log["loss"] for log in logging_outputs) / size, size)

    @register_criterion("nested_for_test")
    class NestedForTest(CrossEntropyCriterion):
        """A criterion that calls another one and takes half of its loss; the regulariser must
        still come in once, and whole."""

        def __init__(self, task, sentence_avg):
            super().__init__(task, sentence_avg)
            self.inner = CrossEntropyCriterion(task, sentence_avg)

        def forward(self, model, sample, reduce=True):
            loss, size, log = self.inner(model, sample)
            return loss / 2, size, log


@pytest.mark.parametrize(
    "criterion", ["cross_entropy", "label_smoothed_cross_entropy", "foreign_for_test"]
)
def test_centroids_move_with_the_regulariser_and_only_with_it(corpus, tmp_path, criterion) -> None:
    values = {}
    for weight in ("0", "1"):
        for updates in (1, 4):
            where = tmp_path / f"{weight}-{updates}"
            flags = [*TRANSFORMER, "--criterion", criterion, "--lr", "1e-2"]
            dpq = VQ + f"--dpq-regularizer-weight {weight}"
            # The first update's learning rate is 0 in neither run: compare 1 update with 4.
            train(corpus, where, *flags, updates=updates, dpq=dpq)
            values[weight, updates] = last(where)["model"]["encoder.embed_tokens.values"]
    assert torch.equal(values["0", 1], values["0", 4])
    assert (values["1", 1] - values["1", 4]).abs().max() > 1e-3


def test_regulariser_is_scaled_by_sample_size_and_added_once(corpus, tmp_path) -> None:
    """Computed from the saved tables: one SGD step with and without the regulariser.

    With weight r the centroids move by lr * r * d(reg)/dV whatever the criterion's sample size, so
    that twice the weight moves them twice as far, and a nested criterion no further.
    """
    moved = {}
    for name, criterion, weight in (
        ("start", "cross_entropy", "0"),
        ("once", "cross_entropy", "1"),
        ("twice", "cross_entropy", "2"),
        ("nested", "nested_for_test", "1"),
        ("foreign", "foreign_for_test", "1"),
        ("sentence", "cross_entropy --sentence-avg", "1"),
    ):
        flags = [*TRANSFORMER, "--criterion", *criterion.split(), "--optimizer", "sgd"]
        dpq = VQ + f"--dpq-regularizer-weight {weight} --lr 0.5"
        train(corpus, tmp_path / name, *flags, updates=1, dpq=dpq)
        moved[name] = last(tmp_path / name)["model"]["encoder.embed_tokens.values"]
    step = moved["once"] - moved["start"]
    assert step.abs().max() > 1e-4
    torch.testing.assert_close(moved["twice"] - moved["start"], 2 * step, rtol=1e-3, atol=1e-7)
    for name in ("nested", "foreign", "sentence"):
        torch.testing.assert_close(moved[name] - moved["start"], step, rtol=1e-3, atol=1e-7)


def test_a_run_cannot_lose_the_regulariser_silently(corpus, tmp_path, monkeypatch) -> None:
    from fairseq.tasks.fairseq_task import FairseqTask

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        model.train()
        model.set_num_updates(update_num)
        loss, size, log = criterion.forward(model, sample)  # past the module call
        optimizer.backward(loss)
        return loss, size, log

    monkeypatch.setattr(FairseqTask, "train_step", train_step)
    with pytest.raises(DPQConfigError, match=r"regulariser of encoder.embed_tokens did not"):
        train(corpus, tmp_path, *TRANSFORMER, updates=2, dpq=VQ)


def test_a_batch_that_fails_leaves_no_regulariser() -> None:
    """The trainer goes on after a lack of memory: the next loss must not have two terms."""
    from fairseq_dpq import DPQEmbedding

    class Fails(FairseqCriterion):
        def forward(self, model, sample, reduce=True):
            loss = model(sample).sum()
            if len(sample) > 3:
                raise RuntimeError("out of memory")
            return loss, 1, {}

    model = DPQEmbedding(9, 4, K=2, D=2, method="vq", schedule="paper")
    model.defer_updates = True
    criterion = Fails(None)
    alone = criterion(model, torch.arange(3))[0].item()
    with pytest.raises(RuntimeError, match="out of memory"):
        criterion(model, torch.arange(5))
    assert not model.regularizers.waiting
    assert criterion(model, torch.arange(3))[0].item() == alone


def test_validation_loss_is_the_tasks_alone(corpus, tmp_path) -> None:
    """The same weights give the same validation loss for any weight of the regulariser."""
    losses = set()
    for weight in ("1", "1000"):
        flags = [*TRANSFORMER, "--lr", "1e-30"]
        log = train(
            corpus,
            tmp_path / weight,
            *flags,
            updates=1,
            dpq=VQ + f"--dpq-regularizer-weight {weight}",
        )
        losses.add(fsq.logged(log, r"valid on .*? \| loss")[0])
        train_loss = fsq.logged(log, r"train_inner \| .*? loss")[0]
        assert train_loss < 10
    assert len(losses) == 1


@pytest.mark.parametrize("option", ["--dpq-regularizer-weight", "--dpq-commitment"])
def test_the_logged_regulariser_is_the_error_for_any_weight(corpus, tmp_path, option) -> None:
    """The same unit in training and validation: the mean squared error, without weights."""
    logged = {}
    for weight in ("1", "1000"):
        dpq = f"{VQ} {option} {weight}"
        log = train(corpus, tmp_path / weight, *TRANSFORMER, "--lr", "1e-30", updates=1, dpq=dpq)
        logged[weight] = [
            fsq.logged(log, pattern + r".*? dpq_regularizer")[0]
            for pattern in (r"train_inner \|", r"valid on .*?\|")
        ]
    assert logged["1"] == logged["1000"]
    trained, valid = logged["1"]
    assert valid > 0 and trained > 0
    assert abs(trained - valid) < 0.3 * valid


def test_a_search_in_validation_does_not_change_the_regulariser(corpus, tmp_path) -> None:
    """--eval-bleu runs the model outside the criterion: neither the logged error of validation
    nor the loss of the next training batch may take those passes in."""
    logs = {}
    for name, more in (("plain", []), ("bleu", ["--eval-bleu", "--eval-bleu-args", "{}"])):
        flags = [*TRANSFORMER, *more, "--validate-interval-updates", "1"]
        logs[name] = train(corpus, tmp_path / name, *flags, updates=3, dpq=VQ)
    assert "bleu" in logs["bleu"]
    for pattern in (
        r"train_inner \| .*? loss",
        r"train_inner \|.*? dpq_regularizer",
        r"valid on .*? dpq_regularizer",
    ):
        plain, bleu = (fsq.logged(logs[name], pattern) for name in ("plain", "bleu"))
        assert len(plain) == 3 and plain == bleu, pattern


@pytest.mark.parametrize("log_format", ["simple", "json", "tqdm", "none"])
def test_log_formats(corpus, tmp_path, log_format) -> None:
    flags = [*TRANSFORMER, "--log-format", log_format, "--log-file", str(tmp_path / "log.txt")]
    flags += ["--tensorboard-logdir", str(tmp_path / "tb")] if log_format == "simple" else []
    text = train(
        corpus, tmp_path / "ck", *flags, "--validate-interval-updates", "2", updates=4, dpq=VQ
    )
    if log_format == "json":
        rows = [
            json.loads(line[line.index("{") :])
            for line in text.splitlines()
            if '"valid_loss"' in line
        ]
        assert {"valid_dpq_regularizer", "valid_dpq_used", "valid_dpq_entropy"} <= rows[0].keys()
        assert "valid_dpq_changed" in rows[1] and 0 <= float(rows[1]["valid_dpq_changed"]) <= 1
    elif log_format == "none":  # fairseq prints no figures then; the line of each table remains
        assert "dpq_used" not in text
        assert re.search(r"encoder.embed_tokens: [\d.]+% of codes used, entropy [\d.]+ bits", text)
    else:
        valid = [line for line in text.splitlines() if "valid on" in line and "loss" in line]
        assert re.search(r"dpq_regularizer [\d.]+ .*dpq_used [\d.]+ .*dpq_entropy [\d.]+", valid[0])
        assert re.search(r"dpq_changed [\d.]+", valid[1])
    if log_format == "simple":
        pytest.importorskip("tensorboard", reason="the older stack's environment has none")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tb" / "valid"))
        events.Reload()
        tags = events.Tags()["scalars"]
        assert {"dpq_regularizer", "dpq_used", "dpq_entropy", "dpq_changed"} <= set(tags)


def test_validation_during_the_warmup_says_that_there_are_no_codes_yet(corpus, tmp_path) -> None:
    """Validated after each update: before, at and after the first codes; one table is tied."""
    flags = [*TRANSFORMER, "--validate-interval-updates", "1"]
    flags += ["--share-decoder-input-output-embed"]
    dpq = "--dpq-K 8 --dpq-D 4 --dpq-warmup-updates 2 --dpq-ramp-updates 1 --dpq-embeddings all"
    log = train(corpus, tmp_path, *flags, updates=4, dpq=dpq)
    assert log.count("encoder.embed_tokens: no codes yet, update 1 of 2 of the warm-up") == 1
    assert len(re.findall(r"encoder.embed_tokens: [\d.]+% of codes used", log)) == 3


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_codes_are_logged_between_validations(corpus, tmp_path, method) -> None:
    """Every second update: a line and TensorBoard figures of each table, a mean in the log."""
    dpq = f"--dpq-K 8 --dpq-D 4 --dpq-method {method} --dpq-warmup-updates 1 --dpq-ramp-updates 1 "
    dpq += "--dpq-embeddings all --dpq-decoder-K 4 --dpq-log-interval 2"
    flags = [*TRANSFORMER, "--disable-validation", "--tensorboard-logdir", str(tmp_path / "tb")]
    log = train(corpus, tmp_path / "ck", *flags, updates=5, dpq=dpq)
    own = r"{}: [\d.]+% of codes used, entropy [\d.]+ bits{}, compression ratio {} \(update {}\)"
    for name, ratio in (("encoder", "7.3"), ("decoder", "14.2")):
        path = f"{name}.embed_tokens"
        assert len(re.findall(own.format(path, "", ratio, 2), log)) == 1
        changed = r", [\d.]+% changed since update 2"
        assert len(re.findall(own.format(path, changed, ratio, 4), log)) == 1
    inner = [line for line in log.splitlines() if "train_inner" in line]
    assert ["dpq_used" in line for line in inner] == [False, True, True, True, True]
    assert "dpq_changed" not in inner[2] and re.search(r"dpq_changed=[\d.]+", inner[3])
    n = 64
    bits = n * 4 * (3 + 2) + 32 * 32 * (8 + 4)
    assert f"dpq_ratio={round(2 * 32 * n * 32 / bits, 4)}," in inner[1]
    pytest.importorskip("tensorboard", reason="the older stack's environment has none")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb" / "dpq"))
    events.Reload()
    for name, codes in (("encoder", 4 * 8), ("decoder", 4 * 4)):
        path = f"{name}.embed_tokens"
        used = events.Scalars(f"{path}/used")
        assert [event.step for event in used] == [2, 4] and 0 < used[0].value <= 1
        assert [event.step for event in events.Scalars(f"{path}/changed")] == [4]
        histogram = events.Histograms(f"{path}/symbols_per_code")[-1].histogram_value
        assert (histogram.num, histogram.sum) == (codes, 4 * (n - 1))  # all symbols but padding


def test_the_log_says_what_the_embeddings_are_of_the_model(corpus, tmp_path) -> None:
    """64 x 32 tables of 8,192 bytes each: source, target and output layer."""
    log = train(corpus, tmp_path, *TRANSFORMER, updates=1, dpq="--dpq-K 8 --dpq-D 4")
    whole = 4 * stock_parameters(corpus, tmp_path)
    small = 64 * 4 * 3 // 8 + 4 * 8 * 32
    after = whole - 8192 + small
    with_decoder = after - 8192 + small
    share = f"{819_200 / whole:.1f} % of the model"
    for line in (
        f"embeddings: 8,192 -> {small:,} bytes once compact, 7.31x smaller ({share})",
        f"model: {whole:,} -> {after:,} bytes once compact, {whole / after:.2f}x smaller (without "
        "optimiser state)",
        f"decoder.embed_tokens stays full ({share}); with --dpq-embeddings all the model would be "
        f"{whole / with_decoder:.2f}x smaller",
        f"decoder.output_projection stays full ({share}); with --share-decoder-input-output-embed "
        f"the model would be {whole / (with_decoder - 8192):.2f}x smaller",
    ):
        assert f"INFO | fairseq_dpq | {line}\n" in log
    tied = [*TRANSFORMER, "--share-decoder-input-output-embed"]
    log = train(corpus, tmp_path / "tied", *tied, updates=1, dpq=SMALL_DPQ)
    assert "stays full" not in log


def stock_parameters(corpus, tmp_path) -> int:
    """Parameters of the same model without DPQ."""
    log = train(corpus, tmp_path / "stock", *TRANSFORMER, updates=1)
    return parameters(log)


def test_collapse_gives_a_warning(corpus, tmp_path, monkeypatch) -> None:
    """All queries alike: one code in use, and the log says what to try."""
    from fairseq_dpq.methods.vq import VQ as Method

    def all_alike(self, parameters, c, tied):
        parameters["query"].fill_(0.1)

    monkeypatch.setattr(Method, "initialize", all_alike)
    log = train(corpus, tmp_path, *TRANSFORMER, "--lr", "1e-30", updates=1, dpq=VQ)
    assert "WARNING | fairseq_dpq | encoder.embed_tokens: the codes collapse (12.5% of codes" in log
    hints = "--dpq-value-gradient 0.1 or --dpq-reseed-after 1000 or --dpq-schedule warmup"
    assert f"Try {hints}\n" in log


def test_statistics_follow_updates_not_micro_batches(corpus, tmp_path) -> None:
    flags = [*TRANSFORMER, "--update-freq", "3"]
    train(corpus, tmp_path, *flags, updates=2, dpq="--dpq-K 8 --dpq-D 4")
    assert last(tmp_path)["model"]["encoder.embed_tokens.norm_updates"].item() == 2
