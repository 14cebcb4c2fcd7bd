"""--task squad through the real commands: from a masked language model with DPQ tables to answers.

Warm start, resume bit for bit, compact form, predictions, and two workers that equal one.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary

from fairseq_dpq.cli import compact
from fairseq_dpq.cli import squad as command
from fairseq_dpq.fairseq_plugin.configs import read_record
from fairseq_dpq.fairseq_plugin.tasks.squad import (
    RobertaForQuestionAnswering,
    SquadDataset,
    SquadSpanCriterion,
    window_starts,
)
from fairseq_dpq.fairseq_plugin.tasks.squad_answers import predict
from fairseq_dpq.files.data import load_model
from helpers import fsq
from helpers.plugin_runs import RUN, last, train

SIZES = shlex.split(
    "--encoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
    "--encoder-attention-heads 2 --max-positions 40 --untie-weights-roberta"
)
MASKED = ["--task", "masked_lm", "--criterion", "masked_lm", "--arch", "roberta_base", *SIZES]
MASKED += ["--tokens-per-sample", "40", "--max-tokens", "320"]
SQUAD = ["--task", "squad", "--criterion", "squad_span", "--arch", "roberta_qa", *SIZES]
SQUAD += shlex.split("--tokens-per-sample 40 --doc-stride 9 --query-length 4 --batch-size 10")
DPQ = "--dpq-K 8 --dpq-D 4"


def test_window_starts() -> None:
    assert window_starts(10, 10, 4) == [0]
    assert window_starts(11, 10, 4) == [0, 4]
    assert window_starts(19, 10, 4) == [0, 4, 8, 12]  # 12 + 10 covers 19; 8 + 10 does not
    assert window_starts(25, 10, 99) == [0, 10, 20]  # no piece is left out
    assert window_starts(0, 10, 4) == [0]


class Lines(list):
    """Tensors as an indexed dataset of fairseq has them."""

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(tensor) for tensor in self])


def test_inputs_and_targets() -> None:
    cfg = Namespace(tokens_per_sample=10, doc_stride=2, query_length=2, seed=1)
    questions = Lines([torch.tensor([11, 12, 13, 2])])
    contexts = Lines([torch.tensor([20, 21, 22, 23, 24, 2])])
    spans = np.array([[3, 4]])
    found = SquadDataset(questions, contexts, spans, Dictionary(), cfg, shuffle=False)
    # Room for 4 pieces: 20..23, then 22..24. The question is cut to two pieces.
    assert found.windows == [(0, 0, 4), (0, 2, 3)]
    assert found.sizes.tolist() == [10, 9]
    assert found[0]["tokens"].tolist() == [0, 11, 12, 2, 2, 20, 21, 22, 23, 2]
    assert found[0]["target"] == [0, 0]  # the last piece of the answer is missing
    assert found[1]["tokens"].tolist() == [0, 11, 12, 2, 2, 22, 23, 24, 2]
    assert found[1]["target"] == [6, 7]
    batch = found.collater([found[0], found[1]])
    assert batch["net_input"]["src_tokens"][1].tolist()[-1] == 1  # padding
    assert batch["context"].tolist() == [[5, 4], [5, 3]]
    assert (batch["ntokens"], batch["nsentences"]) == (19, 2)
    none = SquadDataset(questions, contexts, np.array([[-1, -1]]), Dictionary(), cfg, False)
    assert [none[i]["target"] for i in range(2)] == [[0, 0], [0, 0]]


def test_loss_is_the_mean_of_start_and_end() -> None:
    """Two positions and padding: log(1 + e) and log 2 by hand."""
    logits = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [9.0, 9.0]]])

    def model(src_tokens: torch.Tensor, src_lengths: torch.Tensor) -> tuple:
        return logits, None

    net = {"src_tokens": torch.tensor([[0, 5, 1]]), "src_lengths": torch.tensor([2])}
    sample = {"net_input": net, "target": torch.tensor([[1, 0]]), "ntokens": 2, "nsentences": 1}
    criterion = SquadSpanCriterion(
        Namespace(source_dictionary=Dictionary(), target_dictionary=None)
    )
    loss, size, log = criterion(model, sample)
    assert size == 1
    expected = (np.log(1 + np.e) + np.log(2)) / 2
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert int(log["ncorrect"]) == 0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions `q3` whose answer is the piece after `m3` in the context; some have none."""
    root = tmp_path_factory.mktemp("squad")
    rng = random.Random(2)
    words = [f"w{i}" for i in range(30)] + [f"{c}{i}" for c in "qm" for i in range(5)]
    (root / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    bin = root / "bin"
    bin.mkdir()
    for split, n in (("train", 100), ("valid", 20)):
        lines: dict[str, list[str]] = {"question": [], "context": [], "spans": [], "examples": []}
        for number in range(n):
            pieces = [f"w{rng.randrange(30)}" for _ in range(rng.randint(8, 60))]
            mark, place = rng.randrange(5), rng.randrange(len(pieces) - 1)
            answer, span = [], "-1 -1"
            if number % 4:
                pieces[place], answer = f"m{mark}", [pieces[place + 1]]
                span = f"{place + 1} {place + 1}"
            offsets, start = [], 0
            for piece in pieces:
                offsets.append([start, start + len(piece)])
                start += len(piece) + 1
            lines["question"].append(f"q{mark} w1 w2 w3 w4")
            lines["context"].append(" ".join(pieces))
            lines["spans"].append(span)
            example = {"id": str(number), "context": " ".join(pieces), "offsets": offsets}
            lines["examples"].append(json.dumps({**example, "answers": answer}))
        for part, texts in lines.items():
            (root / f"{split}.{part}").write_text("".join(line + "\n" for line in texts))
        (root / f"{split}.spans").rename(bin / f"{split}.spans")
        (root / f"{split}.examples").rename(bin / f"{split}.examples.jsonl")
    for part in ("question", "context"):
        argv = ["--only-source", "--srcdict", str(root / "dict.txt"), "--destdir", str(bin / part)]
        for split in ("train", "valid"):
            argv += [f"--{split}pref", str(root / f"{split}.{part}")]
        fsq.main("preprocess", argv)
    return root


@pytest.fixture(scope="module")
def pretrained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model of the contexts, with a DPQ table."""
    where = tmp_path_factory.mktemp("pretrained")
    train(text / "bin" / "context", where, *MASKED, updates=4, dpq=DPQ)
    return where / "checkpoint_last.pt"


def fine_tune(text: Path, where: Path, start: Path, *flags: str, updates: int = 6) -> str:
    flags = (*SQUAD, "--finetune-from-model", str(start), *flags)
    return train(text / "bin", where, *flags, updates=updates, dpq=DPQ)


@pytest.mark.slow
def test_warm_start_keeps_the_tables(text: Path, pretrained: Path, tmp_path: Path) -> None:
    """Without a step every tensor is the pre-trained one; only the head is new."""
    fine_tune(text, tmp_path, pretrained, "--lr", "0", updates=1)
    before, after = torch.load(pretrained)["model"], last(tmp_path)["model"]
    assert {k for k in after if k not in before} == {"span_head.weight", "span_head.bias"}
    learned = [name for name in before if "embed_tokens" in name]
    assert any(name.endswith("query") for name in learned) and len(learned) > 2
    for key, tensor in fsq.learned(before).items():
        if not any(part in key for part in ("norm_", "updates", "running", "usage")):
            assert torch.equal(tensor, after[key]), key
    record = read_record(last(tmp_path)["cfg"]["model"])
    assert record is not None
    (table,) = record.tables.values()
    assert list(record.tables) == ["encoder.sentence_encoder.embed_tokens"]
    assert (table.options["K"], table.options["D"], table.num_embeddings) == (8, 4, 45)
    again = read_record(torch.load(pretrained)["cfg"]["model"])
    assert again is not None
    assert again.tables["encoder.sentence_encoder.embed_tokens"].options == table.options


@pytest.mark.slow
def test_resume_compact_and_answers(
    text: Path, pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = fine_tune(text, tmp_path / "whole", pretrained)
    fine_tune(text, tmp_path / "parts", pretrained, updates=3)
    resumed = fine_tune(text, tmp_path / "parts", pretrained)
    assert "(epoch 1 @ 3 updates)" in resumed
    a, b = last(tmp_path / "whole"), last(tmp_path / "parts")
    assert a["optimizer_history"][-1]["num_updates"] == 6
    for key, tensor in fsq.learned(a["model"]).items():
        assert torch.equal(tensor, b["model"][key]), key
    losses = fsq.logged(log, r"train_inner \| epoch.* loss")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1

    source, target = tmp_path / "whole" / "checkpoint_last.pt", tmp_path / "compact.pt"
    assert compact.main([str(source), str(target)]) == 0
    assert target.stat().st_size < source.stat().st_size
    outputs, losses = [], []
    for checkpoint in (source, target):
        argv = [text / "bin", "--user-dir", fsq.USER_DIR, "--path", checkpoint, "--cpu"]
        argv += ["--task", "squad", "--criterion", "squad_span", "--batch-size", "10"]
        out = fsq.main("validate", [*map(str, argv), "--required-batch-size-multiple", "1"])
        losses.append(fsq.logged(out, r"\| loss")[-1])
        model, task = load_model(checkpoint, "squad", {"data": str(text / "bin")}, "")
        found = list(predict(model, task, n=3))
        assert len(found) == 20 and sum(not p.golds for p in found) == 5
        outputs.append([(p.answers, p.odds) for p in found])
        capsys.readouterr()
        argv = [str(checkpoint), "--data", str(text / "bin"), "--json", "--cpu"]
        argv += ["--predictions", str(tmp_path / f"{checkpoint.stem}.json")]
        assert command.main(argv) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["questions"] == 20 and facts["best_f1"] >= facts["f1"]
    assert losses == fsq.logged(log, r"valid on .* \| loss") * 2
    assert outputs[0] == outputs[1]  # the same logits, bit for bit
    texts = json.loads((tmp_path / "compact.json").read_text())
    assert texts == json.loads((tmp_path / "checkpoint_last.json").read_text())
    contexts = (text / "valid.context").read_text().splitlines()
    assert all(texts[str(i)] in contexts[i] for i in range(20))
    done = subprocess.run(
        ["scripts/score.sh", "squad2", target, "--cpu"],
        cwd=Path(fsq.USER_DIR).parent,
        env={**os.environ, "DATA": str(text / "bin"), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["f1"] == facts["f1"], done.stderr[-2000:]


@pytest.mark.slow
def test_two_workers_equal_one(text: Path, pretrained: Path, tmp_path: Path) -> None:
    flags = [
        *SQUAD,
        "--dropout",
        "0",
        "--attention-dropout",
        "0",
        "--max-update",
        "3",
        *DPQ.split(),
    ]
    flags += ["--finetune-from-model", pretrained, "--optimizer", "sgd", "--lr", "0.05"]
    flags += ["--dpq-schedule", "paper", "--find-unused-parameters", "--disable-validation"]
    base = [text / "bin", "--user-dir", fsq.USER_DIR, *RUN, *flags]
    start = ["--nproc_per_node", "2", "--master_port", fsq.free_port(), "--no_python"]
    two, one = tmp_path / "two", tmp_path / "one"
    train_command = [fsq.script("fairseq-train"), *base]
    fsq.run(["torchrun", *start, *train_command, "--save-dir", two])
    fsq.main("train", [str(w) for w in [*base, "--save-dir", one, "--update-freq", "2"]])
    a, b = last(two)["model"], last(one)["model"]
    moved = torch.load(pretrained)["model"]["encoder.sentence_encoder.embed_tokens.query"]
    name = "encoder.sentence_encoder.embed_tokens.query"
    assert (b[name] - moved).abs().max() > 1e-5
    for key in b:
        torch.testing.assert_close(a[key], b[key], rtol=2e-4, atol=2e-6, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--arch", "roberta_base"], "with --task squad use --arch roberta_qa"),
        (["--max-positions", "30"], "--tokens-per-sample 40 is more than the model's"),
        (["--query-length", "36"], "leave room for a context"),
        (["--doc-stride", "0"], "--doc-stride 0"),
    ],
)
def test_refusals(text: Path, tmp_path: Path, change: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(text / "bin", tmp_path, *SQUAD, *change, updates=1)


@pytest.mark.slow
def test_command_refuses_other_checkpoints(
    text: Path, pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint, data, message in (
        (pretrained, text / "nothing", "nothing/valid.examples.jsonl; run: scripts/prepare.sh"),
        (pretrained.with_name("none.pt"), text / "bin", "none.pt"),
        (pretrained, text / "bin", "not of --task squad; fine-tune it: scripts/train.sh squad1"),
        (text / "bin" / "valid.spans", text / "bin", "is not a PyTorch checkpoint"),
    ):
        assert command.main([str(checkpoint), "--data", str(data), "--cpu"]) == 2
        assert message in capsys.readouterr().err
    before = pretrained.read_bytes()
    for flags, message in (
        ("--n-best 0", "--n-best 0 is not positive"),
        ("--doc-stride 0", "--doc-stride 0 is not positive"),
        (f"--predictions {pretrained}", "is the input itself"),
        (f"--predictions {text / 'bin' / 'valid.spans'}", "exists; use --force"),
        (f"--n-best-file {text / 'nothing' / 'x.json'}", "does not exist"),
        ("--predictions x.json --n-best-file x.json", "are the same file"),
    ):
        argv = [str(pretrained), "--data", str(text / "bin"), *flags.split()]
        assert command.main(argv) == 2
        assert message in capsys.readouterr().err
    assert pretrained.read_bytes() == before


def test_head_is_new_only_where_the_checkpoint_has_none() -> None:
    model = torch.nn.Module.__new__(RobertaForQuestionAnswering)
    torch.nn.Module.__init__(model)
    model.span_head = torch.nn.Linear(2, 2)
    state = {"span_head.weight": torch.zeros(2, 2)}
    model.upgrade_state_dict_named(state, "")
    assert torch.equal(state["span_head.weight"], torch.zeros(2, 2))
    assert torch.equal(state["span_head.bias"], model.span_head.bias)
