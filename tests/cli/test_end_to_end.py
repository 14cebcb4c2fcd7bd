"""fairseq-train, fairseq-dpq-compact, then fairseq's own commands: the compact checkpoint gives the
same hypotheses, scores and perplexities, digit for digit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import compact, inspect
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.configs import read_record
from helpers import fsq
from helpers.tool_runs import LSTM, LSTM_LM, ROBERTA, TF, TLM, score, train
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow

FP16 = "--fp16 --fp16-no-flatten-grads --fp16-init-scale 4 "

# name: (data, what scores it, model flags, DPQ flags, flags of the tool)
MATRIX = {
    "encoder": ("corpus", "generate", TF, "--dpq-K 8 --dpq-D 4", ""),
    "decoder-tied": (
        "corpus",
        "generate",
        TF + " --share-decoder-input-output-embed",
        "--dpq-K 6 --dpq-D 8 --dpq-method vq --dpq-embeddings decoder",
        "",
    ),
    "all-shared-shrunk": (
        "corpus",
        "generate",
        TF + " --share-decoder-input-output-embed",
        "--dpq-K 16 --dpq-D 16 --dpq-share-subspaces --dpq-embeddings all --dpq-decoder-K 64 "
        "--dpq-decoder-D 4",
        "--lossless-shrink",
    ),
    "share-all": (
        "joined",
        "generate",
        TF + " --share-all-embeddings",
        "--dpq-K 32 --dpq-D 16 --dpq-method vq --dpq-share-subspaces --dpq-embeddings all",
        "",
    ),
    "ema": (
        "corpus",
        "generate",
        TF + " --store-ema --ema-decay 0.8",
        "--dpq-K 8 --dpq-D 8 --dpq-embeddings all",
        "--ema",
    ),
    "fp16": (
        "corpus",
        "generate",
        FP16 + TF + " --share-decoder-input-output-embed",
        "--dpq-K 8 --dpq-D 8 --dpq-method vq --dpq-embeddings all",
        "",
    ),
    "lstm": (
        "corpus",
        "generate",
        LSTM + " --share-decoder-input-output-embed",
        "--dpq-K 8 --dpq-D 8 --dpq-embeddings all",
        "",
    ),
    "transformer_lm": (
        "lm",
        "eval_lm",
        TLM + "--share-decoder-input-output-embed",
        "--dpq-K 8 --dpq-D 8",
        "",
    ),
    "lstm_lm": (
        "lm",
        "eval_lm",
        LSTM_LM + "--share-decoder-input-output-embed",
        "--dpq-K 8 --dpq-D 8 --dpq-method vq --dpq-share-subspaces",
        "--lossless-shrink",
    ),
    "text_classifier": (
        "documents",
        "classify",
        "--task text_classification --criterion sentence_prediction --arch text_classifier "
        "--encoder-embed-dim 32 --hidden-size 16 --batch-size 12",
        "--dpq-K 8 --dpq-D 8 --dpq-method vq",
        "",
    ),
    "roberta": ("lm", "validate", ROBERTA, "--dpq-K 8 --dpq-D 8 --dpq-embeddings all", ""),
}


def _ema_checkpoint(path: Path) -> Path:
    """How fairseq itself makes a checkpoint of the EMA weights."""
    from fairseq import checkpoint_utils

    target = path.with_name("ema.pt")
    checkpoint_utils.save_ema_as_checkpoint(str(path), str(target))
    return target


@pytest.mark.parametrize("name", MATRIX)
def test_compact_scores_like_its_training_checkpoint(name, request, tmp_path, capsys) -> None:
    if name == "fp16" and torch.__version__.startswith("1."):
        pytest.skip("torch 1 has no half precision on the CPU")
    data_name, kind, model, dpq, tool = MATRIX[name]
    data = request.getfixturevalue(data_name)
    trained = train(data, tmp_path, f"{model} {dpq}")
    small = tmp_path / "compact.pt"
    assert compact.main([str(trained), str(small), *shlex.split(tool), "--debug"]) == 0
    if name == "ema":
        last, trained = trained, _ema_checkpoint(trained)
        assert score(kind, data, last, 1) != score(kind, data, trained, 1)
    for beam in (1, 5) if kind == "generate" else (1,):
        assert score(kind, data, small, beam) == score(kind, data, trained, beam)

    state = load(small)
    tables = read_record(state["cfg"]["model"]).tables
    for path, table in tables.items():
        left = {key.rsplit(".", 1)[1] for key in state["model"] if key.startswith(path + ".")}
        assert left - {"sizes"} == {"codes", "values"}
        for alias in table.aliases:
            codes = [state["model"][f"{p}.codes"] for p in (path, alias)]
            assert codes[0].data_ptr() == codes[1].data_ptr()
    assert "last_optimizer_state" not in state
    assert small.stat().st_size < trained.stat().st_size / 1.5


def test_a_compact_checkpoint_in_every_other_command(corpus, tmp_path, capsys) -> None:
    """interactive, validate, from_pretrained; not training, and not averaging."""
    from fairseq.models.transformer import TransformerModel

    model, dpq = TF + " --share-decoder-input-output-embed", "--dpq-K 8 --dpq-D 8"
    dpq += " --dpq-embeddings all"
    trained = train(corpus, tmp_path, f"{model} {dpq}")
    small = tmp_path / "compact.pt"
    flags = ["--lossless-shrink", "--exact-logits"]
    assert compact.main([str(trained), str(small), *flags]) == 0

    text, valid, hub = [], [], []
    for path in (trained, small):
        argv = [str(corpus), "--user-dir", fsq.USER_DIR, "--path", str(path), "--cpu"]
        said = fsq.main("interactive", argv, input="a1 a2 a3\na4 a0\n")
        text.append(re.findall(r"^[HP]-\d+\t.*$", said, re.MULTILINE))
        argv += ["--task", "translation", "--max-tokens", "400", "--valid-subset", "test"]
        argv += ["--required-batch-size-multiple", "1", "--log-format", "simple"]
        said = fsq.main("validate", [*argv, "--num-workers", "0"])
        valid.append(re.findall(r"loss [\d.]+ .*ppl [\d.]+", said)[-1:])
        loaded = TransformerModel.from_pretrained(
            str(tmp_path), path.name, str(corpus), user_dir=fsq.USER_DIR
        )
        hub.append(loaded.translate(["a1 a2 a3", "a4"], beam=3))
        with torch.no_grad():
            hub.append(loaded.models[0].encoder.embed_tokens(torch.arange(20)))
    assert len(text[0]) == 4 and text[0] == text[1]
    assert valid[0] and valid[0] == valid[1]
    assert hub[0] == hub[2] and torch.equal(hub[1], hub[3])

    with pytest.raises(DPQConfigError, match=f"compact checkpoint.*{re.escape(str(trained))}"):
        train(corpus, tmp_path / "again", f"{model} {dpq} --restore-file {small}")

    # half precision for all: other numbers, but a model that loads and a smaller file
    halved = tmp_path / "half.pt"
    assert compact.main([str(trained), str(halved), "--half", "--values-dtype", "bfloat16"]) == 0
    assert halved.stat().st_size < 0.7 * small.stat().st_size
    assert len(score("generate", corpus, halved, 1)) == 51

    capsys.readouterr()
    assert inspect.main([str(trained), str(small), "--debug"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    forms = {row[1]: row[-1] for row in rows if len(row) > 1 and row[1] in ("training", "compact")}
    assert forms["training"] == f"{trained.stat().st_size:,}"
    assert forms["compact"] == f"{small.stat().st_size:,}"
