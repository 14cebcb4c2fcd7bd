"""Stock architectures with DPQ tables through the real commands: train, resume, score.

Each row trains with a checkpoint in the middle of an epoch, resumes it bit for bit, and scores
every sentence. Parameter counts show that nothing was untied.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fairseq_dpq.fairseq_plugin.configs import read_record
from helpers import fsq
from helpers.plugin_runs import SMALL, last, parameters, train

pytestmark = pytest.mark.slow

LM = "--task language_modeling --tokens-per-sample 40 --sample-break-mode none --max-tokens 320 "
TLM = (
    LM + "--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 32 --decoder-input-dim 32 "
    "--decoder-output-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 "
)
ROBERTA = (
    "--arch roberta_base --encoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
    "--encoder-attention-heads 2 --max-positions 64 "
)


@dataclass
class Row:
    """One architecture: its data, its flags, its tables, and what scores it."""

    data: str
    flags: str
    tables: dict[str, list[str]]  # path -> output layers tied to it
    score: str  # generate, eval_lm or validate
    embeddings: str = "all"
    criterion: str = "cross_entropy"


MATRIX = {
    "transformer": Row(
        "corpus",
        "--arch transformer --max-tokens 200 " + SMALL,
        {"encoder.embed_tokens": [], "decoder.embed_tokens": []},
        "generate",
        criterion="label_smoothed_cross_entropy --label-smoothing 0.1",
    ),
    "transformer-input": Row(
        "corpus",
        "--arch transformer --max-tokens 200 " + SMALL,
        {"encoder.embed_tokens": []},
        "generate",
        embeddings="input",
    ),
    "transformer-tied": Row(
        "corpus",
        "--arch transformer --share-decoder-input-output-embed --max-tokens 200 " + SMALL,
        {"decoder.embed_tokens": ["decoder.output_projection"]},
        "generate",
        embeddings="decoder",
    ),
    "transformer-share-all": Row(
        "joined",
        "--arch transformer --share-all-embeddings --max-tokens 200 " + SMALL,
        {"encoder.embed_tokens": ["decoder.output_projection"]},
        "generate",
    ),
    "transformer_lm": Row("lm", TLM, {"decoder.embed_tokens": []}, "eval_lm", "input"),
    "transformer_lm-tied": Row(
        "lm",
        TLM + "--share-decoder-input-output-embed",
        {"decoder.embed_tokens": ["decoder.output_projection"]},
        "eval_lm",
    ),
    "lstm": Row(
        "corpus",
        "--arch lstm --encoder-embed-dim 32 --encoder-hidden-size 32 --decoder-embed-dim 32 "
        "--decoder-hidden-size 32 --decoder-out-embed-dim 32 --max-tokens 200 "
        "--share-decoder-input-output-embed --lr 0.02",  # an LSTM's first updates do little
        {"encoder.embed_tokens": [], "decoder.embed_tokens": []},
        "generate",
    ),
    "lstm_lm": Row(
        "lm",
        LM + "--arch lstm_lm --decoder-embed-dim 32 --decoder-hidden-size 32 "
        "--decoder-out-embed-dim 32",
        {"decoder.embed_tokens": []},
        "eval_lm",
    ),
    "fconv": Row(
        "corpus",
        "--arch fconv --encoder-embed-dim 32 --encoder-layers [(32,3)] --decoder-embed-dim 32 "
        "--decoder-layers [(32,3)] --decoder-out-embed-dim 32 --share-input-output-embed "
        "--max-tokens 200",
        {"encoder.embed_tokens": [], "decoder.embed_tokens": ["decoder.fc3"]},
        "generate",
    ),
    "roberta": Row(
        "lm",
        "--task masked_lm --tokens-per-sample 40 --max-tokens 320 " + ROBERTA,
        {"encoder.sentence_encoder.embed_tokens": ["encoder.lm_head"]},
        "validate",
        criterion="masked_lm",
    ),
    "roberta-sentence": Row(
        "sentences",
        "--task sentence_prediction --num-classes 2 --init-token 0 --separator-token 2 "
        "--max-tokens 160 " + ROBERTA,
        {"encoder.sentence_encoder.embed_tokens": ["encoder.lm_head"]},
        "validate",
        criterion="sentence_prediction",
    ),
    "text_classifier": Row(
        "sentences",
        "--task text_classification --arch text_classifier --encoder-embed-dim 32 "
        "--hidden-size 16 --batch-size 12",
        {"encoder.embed_tokens": []},
        "validate",
        criterion="sentence_prediction",
    ),
    "bart": Row(
        "joined",
        "--task translation --arch bart_base --max-tokens 200 --max-source-positions 64 "
        "--max-target-positions 64 " + SMALL,
        {"encoder.embed_tokens": ["decoder.output_projection"]},
        "generate",
    ),
}


# One method each in turn, and both where tables are shared, tied or carried by an LSTM.
BOTH = ("transformer", "transformer-share-all", "lstm", "roberta")
PAIRS = [
    (name, method)
    for i, name in enumerate(MATRIX)
    for j, method in enumerate(("sx", "vq"))
    if name in BOTH or i % 2 == j
]


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_train_resume_score(name: str, method: str, request, tmp_path: Path) -> None:
    row = MATRIX[name]
    data = request.getfixturevalue(row.data)
    flags = [*shlex.split(row.flags), "--criterion", *row.criterion.split()]
    dpq = f"--dpq-K 8 --dpq-D 4 --dpq-method {method} --dpq-embeddings {row.embeddings}"

    whole = train(data, tmp_path / "whole", *flags, updates=6, dpq=dpq)
    train(data, tmp_path / "parts", *flags, updates=3, dpq=dpq)
    resumed = train(data, tmp_path / "parts", *flags, updates=6, dpq=dpq)

    # Resumed in the middle of the first epoch, the run ends bit for bit like the uninterrupted one.
    assert "Loaded checkpoint" in resumed and "(epoch 1 @ 3 updates)" in resumed
    a, b = last(tmp_path / "whole"), last(tmp_path / "parts")
    assert a["optimizer_history"][-1]["num_updates"] == 6
    assert a["model"].keys() == b["model"].keys()
    for key, tensor in fsq.learned(a["model"]).items():
        assert torch.equal(tensor, b["model"][key]), key

    # The loss falls.
    losses = fsq.logged(whole, r"train_inner \| epoch.* loss")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.02

    # Each table is at its path, and tied to the same layers as before.
    record = read_record(a["cfg"]["model"])
    assert {path: t.tied for path, t in record.tables.items()} == row.tables
    stock = train(data, tmp_path / "stock", *flags, updates=1)
    expected = parameters(stock)
    for table in record.tables.values():
        n, d = table.num_embeddings, table.embedding_dim
        expected += n * d + 8 * d + (8 * d if method == "sx" else 0) - n * d
    assert parameters(whole) == expected

    score(row, data, flags, tmp_path / "whole")


def score(row: Row, data: Path, flags: list[str], save_dir: Path) -> None:
    """Every sentence, or token, of the test set is scored by the stock command."""
    common = [data, "--user-dir", fsq.USER_DIR, "--path", save_dir / "checkpoint_last.pt", "--cpu"]
    if row.score == "generate":
        out = fsq.main("generate", [*map(str, common), "--batch-size", "8", "--beam", "2"])
        assert len(re.findall(r"^H-\d+", out, re.M)) == 21
        out = fsq.main(
            "interactive",
            [*map(str, common), "--source-lang", "src", "--target-lang", "tgt"],
            input="a1 a2 a3\na0\n",
        )
        assert len(re.findall(r"^H-\d+", out, re.M)) == 2
    elif row.score == "eval_lm":
        out = fsq.main("eval_lm", [*map(str, common), "--tokens-per-sample", "40"])
        tokens = int(re.findall(r"Evaluated (\d+) tokens", out)[0])
        text = (data.parent / "txt" / "test.mono").read_text()
        assert tokens == len(text.split()) + len(text.splitlines())
    else:
        task = flags[flags.index("--task") + 1]
        argv = [*map(str, common), "--task", task, "--valid-subset", "valid", "--batch-size", "8"]
        if task == "sentence_prediction":
            argv += ["--criterion", task]
        out = fsq.main("validate", argv)
        assert fsq.logged(out, r"\| loss")[-1] > 0
