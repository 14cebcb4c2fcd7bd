"""Language modelling with carried state inside fairseq: lanes, the loss and its normalisation,
exact perplexity, resume in mid-epoch, several workers."""

from __future__ import annotations

import math
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fairseq import optim, options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_dpq.cli import quantize
from fairseq_dpq.fairseq_plugin.tasks.lstm_lm import (
    ZarembaLSTMConfig,
    ZarembaLSTMDecoder,
    ZarembaLSTMLanguageModel,
)
from fairseq_dpq.fairseq_plugin.tasks.truncated_bptt_lm import LaneDataset, TokenStream
from helpers import fsq

pytestmark = pytest.mark.slow

PAD, EOS = 1, 2
STEPS, LANES = 5, 6
MODEL = ["--arch", "zaremba_lstm_lm_small", "--decoder-embed-dim", "12"]
MODEL += ["--decoder-hidden-size", "16"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fsq.make_lm_corpus(tmp_path_factory.mktemp("lm"), n_lines=60, n_valid=9, n_test=7)


def _flags(data: Path, save: Path, updates: int, *more: str) -> list[str]:
    return [
        str(data), "--user-dir", fsq.USER_DIR, "--task", "stateful_lm", *MODEL,
        "--tokens-per-sample", str(STEPS), "--optimizer", "sgd", "--lr", "1.0",
        "--lr-scheduler", "fixed", "--cpu", "--num-workers", "0", "--data-buffer-size", "0",
        "--log-format", "simple", "--log-interval", "1", "--save-dir", str(save),
        "--max-update", str(updates), *more,
    ]  # fmt: skip


def _train(data: Path, save: Path, updates: int, *more: str) -> str:
    """One worker, in this process."""
    argv = _flags(data, save, updates, "--batch-size", str(LANES), *more)
    return fsq.main("train", argv)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(path)["model"])


def _stream(data: Path, split: str) -> tuple[TokenStream, Dictionary]:
    """The split as text says it, read without the task."""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    text = (data.parent / "txt" / f"{split}.mono").read_text().splitlines()
    tokens = [dictionary.index(w) for line in text for w in [*line.split(), "</s>"]]
    return TokenStream(torch.tensor(tokens), split, PAD, EOS), dictionary


def _load(path: Path, dictionary: Dictionary) -> ZarembaLSTMLanguageModel:
    cfg = ZarembaLSTMConfig(decoder_embed_dim=12, decoder_hidden_size=16)
    model = ZarembaLSTMLanguageModel(ZarembaLSTMDecoder(cfg, dictionary))
    model.load_state_dict(_weights(path))
    return model


# ---- lanes ----


@pytest.mark.parametrize(
    ("n", "lanes", "shards", "steps"), [(43, 3, 2, 5), (42, 6, 1, 7), (7, 7, 1, 3), (100, 1, 1, 35)]
)
def test_every_token_is_predicted_once_from_the_token_before(
    n: int, lanes: int, shards: int, steps: int
) -> None:
    tokens = torch.arange(10, 10 + n)  # all different, so that a target tells its place
    stream = TokenStream(tokens, "train", PAD, EOS)
    targets, counted = [], 0
    for shard in range(shards):
        dataset = LaneDataset(stream, lanes, steps, shards, shard)
        assert len(dataset) == math.ceil(math.ceil(n / (lanes * shards)) / steps)
        for i in range(len(dataset)):
            sample = dataset.collater([dataset[i]])
            source, target = sample["net_input"]["src_tokens"], sample["target"]
            assert sample["net_input"]["segment"] == i
            keep = target.ne(PAD)
            assert sample["ntokens"] == int(keep.sum())
            counted += sample["ntokens"]
            targets += target[keep].tolist()
            before = torch.where(target[keep] == 10, torch.tensor(EOS), target[keep] - 1)
            assert source[keep].tolist() == before.tolist()
            if i > 0:  # each lane goes on where the segment before ended
                last = dataset[i - 1]["target"][:, -1]
                assert source[:, 0].tolist() == last.tolist()
    assert counted == n
    assert sorted(targets) == tokens.tolist()


def test_two_workers_hold_the_lanes_of_one() -> None:
    stream = TokenStream(torch.arange(10, 10 + 101), "train", PAD, EOS)
    one = LaneDataset(stream, 6, 4)
    halves = [LaneDataset(stream, 3, 4, 2, shard) for shard in (0, 1)]
    assert len(one) == len(halves[0]) == len(halves[1])
    for i in range(len(one)):
        together = torch.cat([h[i]["target"] for h in halves])
        assert torch.equal(one[i]["target"], together)
    assert torch.cat([h[0]["id"] for h in halves]).tolist() == list(range(6))


def test_too_few_tokens_for_the_lanes() -> None:
    stream = TokenStream(torch.arange(7), "valid", PAD, EOS)
    with pytest.raises(
        ValueError, match=r"valid holds 7 tokens, too few for 8 lanes .*-size 4 on 2"
    ):
        LaneDataset(stream, 4, 5, 2, 0)


# ---- loss ----


def test_update_is_that_of_the_loss_summed_over_steps_and_averaged_over_lanes(
    data: Path, tmp_path: Path
) -> None:
    """Two updates by hand: lr 1 and a clip between the two gradient norms; logs are per token."""
    log = _train(data, tmp_path, 2, "--clip-norm", "1.4", "--disable-validation", "--seed", "3")
    stream, dictionary = _stream(data, "train")
    lanes = LaneDataset(stream, LANES, STEPS)
    model = _load(tmp_path / "checkpoint_last.pt", dictionary)
    torch.manual_seed(3)  # as fairseq seeds before it builds the model
    cfg = ZarembaLSTMConfig(decoder_embed_dim=12, decoder_hidden_size=16)
    reference = ZarembaLSTMLanguageModel(ZarembaLSTMDecoder(cfg, dictionary))
    bits, norms = [], []
    for i in range(2):
        sample = lanes[i]
        logits, _ = reference(**sample["net_input"])
        target = sample["target"].reshape(-1)
        loss = F.cross_entropy(logits.reshape(len(target), -1), target, reduction="sum")
        bits.append(loss.item() / (LANES * STEPS) / math.log(2))
        reference.zero_grad()
        (loss / LANES).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.4)
        norms.append(float(norm))
        with torch.no_grad():
            for p in reference.parameters():
                p -= p.grad
    for (name, got), want in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)
    assert norms[0] < 1.4 < norms[1]  # the clip is at work, once
    assert fsq.logged(log, r"train_inner .* loss") == pytest.approx(bits, abs=6e-4)
    assert fsq.logged(log, "gnorm")[:2] == pytest.approx(norms, abs=6e-4)


def test_perplexity_is_that_of_one_long_pass_in_every_tool(data: Path, tmp_path: Path) -> None:
    log = _train(data, tmp_path, 8, "--batch-size-valid", "1")
    checkpoint = tmp_path / "checkpoint_last.pt"
    stream, dictionary = _stream(data, "valid")
    model = _load(checkpoint, dictionary).eval()
    source = torch.cat([torch.tensor([EOS]), stream.tokens[:-1]])
    with torch.no_grad():
        logits, _ = model(source[None])
    bits = F.cross_entropy(logits[0], stream.tokens).item() / math.log(2)

    assert fsq.logged(log, r"'valid' subset \| loss") == [round(bits, 3)]
    assert fsq.logged(log, r"'valid' subset .* ppl")[0] == pytest.approx(2**bits, rel=1e-3)
    common = ["--path", str(checkpoint), "--user-dir", fsq.USER_DIR, "--cpu"]
    common += ["--task", "stateful_lm", "--num-workers", "0", "--log-format", "simple"]
    valid = fsq.main("validate", [str(data), *common, "--batch-size", "1"])
    assert fsq.logged(valid, r"valid .*\| loss")[-1] == round(bits, 3)
    # fairseq-eval-lm makes a task of its own: the segment length may be another one.
    for steps in (STEPS, 50):
        argv = [*common, "--gen-subset", "valid", "--tokens-per-sample", str(steps)]
        scored = fsq.main("eval_lm", [str(data), *argv])
        assert f"Evaluated {len(stream):,} tokens" in scored
        assert f"Loss (base 2): {bits:.4f}, Perplexity: {2**bits:.2f}" in scored
    # Several lanes start cold several times; still every token counts once.
    lanes = fsq.main("eval_lm", [str(data), *common, "--gen-subset", "test", "--batch-size", "4"])
    assert f"Evaluated {len(_stream(data, 'test')[0]):,} tokens" in lanes


# ---- resume ----


DPQ = ["--dpq-K", "4", "--dpq-D", "3", "--dpq-share-subspaces", "--dpq-method"]


@pytest.mark.parametrize(
    ("segments", "flags"),
    [(1, []), (2, ["--update-freq", "2"]), (1, [*DPQ, "sx"]), (1, [*DPQ, "vq"])],
    ids=["full", "update-freq", "sx", "vq"],
)
def test_resume_in_mid_epoch_is_bit_exact(
    data: Path, tmp_path: Path, segments: int, flags: list[str]
) -> None:
    more = ["--dropout", "0.2", "--clip-norm", "1", "--save-interval-updates", "4"]
    more += ["--max-epoch", "3", "--no-epoch-checkpoints", "--batch-size-valid", "2", *flags]
    updates = math.ceil(17 / segments) + 3  # 495 tokens are 17 segments: into the second epoch
    _train(data, tmp_path / "whole", updates, *more)
    middle = tmp_path / "whole" / "checkpoint_1_4.pt"
    place = torch.load(middle)["extra_state"]["train_iterator"]
    assert place["iterations_in_epoch"] == 4 * segments
    assert tuple(place["hidden_state"].shape) == (4, LANES, 16)
    assert place["hidden_state"].abs().max() > 0.01
    log = _train(data, tmp_path / "parts", updates, *more, "--restore-file", str(middle))
    assert "starts from zeros" not in log
    ends = [tmp_path / run / "checkpoint_last.pt" for run in ("whole", "parts")]
    whole, parts = map(_weights, ends)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert torch.load(ends[1])["extra_state"]["train_iterator"]["epoch"] == 2


def test_resume_with_other_lanes_restarts_the_epoch(data: Path, tmp_path: Path) -> None:
    """... and not the whole schedule: the second epoch, at its own learning rate."""
    schedule = ["--force-anneal", "2", "--lr-shrink", "0.5", "--disable-validation"]
    first = _train(data, tmp_path, 10_000, "--max-epoch", "1", *schedule)
    updates = int(re.findall(r"num_updates (\d+)", first)[-1])
    _train(data, tmp_path, updates + 2, *schedule)
    argv = _flags(data, tmp_path, 10_000, "--batch-size", "4", "--max-epoch", "2", *schedule)
    text = fsq.main("train", argv)
    assert "in the middle of epoch 2 with 6 lanes of 5 steps; this run has 4" in text
    place = torch.load(tmp_path / "checkpoint_last.pt")["extra_state"]["train_iterator"]
    assert (place["epoch"], place["total_lanes"]) == (3, 4)
    assert set(fsq.logged(text, r"num_updates=\d+, lr")) == {0.5}


# ---- what is refused ----


def test_refusals_name_the_flag(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--batch-size is not given"):
        fsq.main("train", _flags(data, tmp_path, 1, "--max-tokens", "100"))
    argv = _flags(data, tmp_path, 1, "--batch-size", "2", "--arch", "lstm_lm")
    with pytest.raises(ValueError, match="LSTMLanguageModel does not carry hidden state"):
        fsq.main("train", argv)
    with pytest.raises(ValueError, match="--tokens-per-sample 0 is not positive"):
        _train(data, tmp_path, 1, "--tokens-per-sample", "0")
    with pytest.raises(ValueError, match=r"cannot average over lanes.*--criterion cross_entropy"):
        _train(data, tmp_path, 1, "--criterion", "masked_lm")


# ---- workers ----


def _worker(argv: list[str], log: Path) -> None:
    log.write_text(fsq.main("train", argv))


def _two_workers(data: Path, save: Path, updates: int, *more: str) -> None:
    port = fsq.free_port()
    flags = _flags(data, save, updates, "--batch-size", str(LANES // 2), *more)
    flags += ["--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-no-spawn"]
    flags += ["--distributed-world-size", "2", "--distributed-backend", "gloo"]
    flags += ["--ddp-backend", "legacy_ddp"]
    # Forked workers need no half minute to import fairseq again.
    context = multiprocessing.get_context("fork")
    logs = [save.with_suffix(f".rank{rank}.log") for rank in (0, 1)]
    workers = [
        context.Process(target=_worker, args=([*flags, "--distributed-rank", str(rank)], log))
        for rank, log in enumerate(logs)
    ]
    for worker in workers:
        worker.start()
    for worker, log in zip(workers, logs):
        worker.join(timeout=120)
        if worker.is_alive():
            worker.kill()
        text = log.read_text() if log.exists() else ""
        assert worker.exitcode == 0, text[-4000:]
        assert "starts from zeros" not in text


def test_two_workers_train_as_one_and_resume_bit_exact(data: Path, tmp_path: Path) -> None:
    more = ["--clip-norm", "1", "--save-interval-updates", "3", "--batch-size-valid", "2"]
    _two_workers(data, tmp_path / "two", 6, *more)
    middle = tmp_path / "two" / "checkpoint_1_3.pt"
    two = _weights(tmp_path / "two" / "checkpoint_last.pt")
    # The same gradient, hence the same weights, as one worker with all lanes.
    _train(data, tmp_path / "one", 6, "--clip-norm", "1", "--disable-validation")
    for name, tensor in _weights(tmp_path / "one" / "checkpoint_last.pt").items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=2e-6, msg=name)
    # All lanes are in the checkpoint: two workers go on bit for bit, and one can take over.
    place = torch.load(middle)["extra_state"]["train_iterator"]
    assert tuple(place["hidden_state"].shape) == (4, LANES, 16)
    _two_workers(data, tmp_path / "again", 6, *more, "--restore-file", str(middle))
    for name, tensor in _weights(tmp_path / "again" / "checkpoint_last.pt").items():
        assert torch.equal(two[name], tensor), name
    _train(data, tmp_path / "over", 6, "--clip-norm", "1", "--restore-file", str(middle))
    for name, tensor in _weights(tmp_path / "over" / "checkpoint_last.pt").items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_two_workers_with_dpq_are_one_that_takes_the_halves_in_turn(
    data: Path, tmp_path: Path, method: str
) -> None:
    """Each half is normalised by its own statistics, so all lanes at once would differ."""
    more = [*DPQ, method, "--dpq-schedule", "paper", "--disable-validation", "--seed", "5"]
    _two_workers(data, tmp_path / "two", 3, *more)
    two = _weights(tmp_path / "two" / "checkpoint_last.pt")

    argv = _flags(data, tmp_path, 3, "--batch-size", str(LANES // 2), *more)
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), argv)
    )
    torch.manual_seed(5)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model).train()
    criterion = task.build_criterion(cfg.criterion)
    sgd = optim.build_optimizer(cfg.optimizer, list(model.parameters()))
    task.load_dataset("train")
    halves = [
        LaneDataset(task.dataset("train"), LANES // 2, STEPS, num_shards=2, shard_id=shard)
        for shard in (0, 1)
    ]
    states: list = [None, None]
    for update in range(3):
        sgd.zero_grad()
        model.set_num_updates(update)
        lanes = 0
        for shard, half in enumerate(halves):
            model.decoder.set_carried_state(states[shard])
            loss, sample_size, _ = criterion(model, half[update])
            loss.backward()
            lanes += sample_size
            states[shard] = model.decoder.carried_state()
        assert lanes == LANES
        sgd.multiply_grads(1 / lanes)
        task.optimizer_step(sgd, model, update)
    one = model.state_dict()
    assert set(one) == set(two)
    assert any("running" in name or "mean" in name for name in one)  # statistics are compared too
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=2e-6, msg=name)


def test_tied_output_with_dpq_evaluates_as_it_validated(data: Path, tmp_path: Path) -> None:
    more = [*DPQ, "sx", "--dpq-D", "4", "--share-decoder-input-output-embed"]
    more += ["--decoder-embed-dim", "16", "--batch-size-valid", "1"]
    log = _train(data, tmp_path, 5, *more)
    (trained,) = fsq.logged(log, r"'valid' subset \| loss")
    names = _weights(tmp_path / "checkpoint_last.pt")
    assert "decoder.output_projection.weight" not in names
    argv = [str(data), "--user-dir", fsq.USER_DIR, "--cpu", "--gen-subset", "valid"]
    argv += ["--path", str(tmp_path / "checkpoint_last.pt"), "--num-workers", "0"]
    text = fsq.main("eval_lm", [*argv, "--task", "stateful_lm"])
    (scored,) = fsq.logged(text, r"Loss \(base 2\):")
    assert scored == pytest.approx(trained, abs=6e-4)
    assert 1 < trained < 7
    # It generates as any language model of fairseq does, each line from zero state.
    argv += ["--task", "language_modeling", "--sample-break-mode", "eos", "--beam", "2"]
    argv += ["--batch-size", "4", "--required-batch-size-multiple", "1", "--max-len-b", "20"]
    text = fsq.main("generate", argv)
    assert len(re.findall(r"^H-\d+", text, re.MULTILINE)) == 9


def test_a_full_table_is_calibrated_on_lanes(data: Path, tmp_path: Path, capsys) -> None:
    """`fairseq-dpq-quantize --calibrate` reads the corpus in as many lanes as training did."""
    _train(data, tmp_path, 3, "--decoder-embed-dim", "16")
    files = [str(tmp_path / "checkpoint_last.pt"), str(tmp_path / "tiers.pt")]
    flags = ["--form", "tiers", "--ratio", "2", "--calibrate", str(data), "--tokens", "200"]
    assert quantize.main([*files, *flags]) == 0
    argv = [str(data), "--user-dir", fsq.USER_DIR, "--cpu", "--gen-subset", "valid"]
    text = fsq.main("eval_lm", [*argv, "--path", files[1], "--task", "stateful_lm"])
    (scored,) = fsq.logged(text, r"Loss \(base 2\):")
    assert 1 < scored < 7
    for name in ("short", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "line").write_text("a")
    argv = ["--only-source", "--srcdict", str(data / "dict.txt"), "--trainpref"]
    fsq.main("preprocess", [*argv, str(tmp_path / "line"), "--destdir", str(tmp_path / "short")])
    for name, said in (
        ("short", "--subset train: train holds 2 tokens, too few for"),
        ("empty", ""),
    ):
        argv = [*files, "--form", "tiers", "--force", "--calibrate", str(tmp_path / name)]
        assert quantize.main(argv) == 2
        error = capsys.readouterr().err
        assert f"--calibrate {tmp_path / name}" in error and said in error


def test_epoch_counts_match_the_corpus(data: Path, tmp_path: Path) -> None:
    """Words per batch times updates over one epoch is the corpus, last short segment included."""
    log = _train(data, tmp_path, 10_000, "--max-epoch", "1", "--disable-validation")
    stream, _ = _stream(data, "train")
    words = [float(v) for v in re.findall(r"train_inner .*?wpb=([\d.]+)", log)]
    assert sum(words) == len(stream)
