"""Training for the tests of the tools, and scores by fairseq's own commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from helpers import fsq

RUN = shlex.split(
    "--cpu --optimizer adam --lr 5e-3 --no-progress-bar --log-format simple --num-workers 0 "
    "--no-epoch-checkpoints --disable-validation --max-update 5 --required-batch-size-multiple 1"
)
TF = "--arch transformer --max-tokens 300 " + " ".join(fsq.SMALL)
LSTM = (
    "--arch lstm --max-tokens 300 --encoder-embed-dim 32 --encoder-hidden-size 32 "
    "--decoder-embed-dim 32 --decoder-hidden-size 32 --decoder-out-embed-dim 32 "
)
LM = "--task language_modeling --tokens-per-sample 40 --max-tokens 320 "
TLM = (
    LM + "--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 32 --decoder-input-dim 32 "
    "--decoder-output-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 "
)
LSTM_LM = (
    LM + "--arch lstm_lm --decoder-embed-dim 32 --decoder-hidden-size 32 "
    "--decoder-out-embed-dim 32 "
)
ROBERTA = (
    "--task masked_lm --criterion masked_lm --arch roberta_base --encoder-layers 1 "
    "--encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-attention-heads 2 "
    "--tokens-per-sample 40 --max-tokens 320 "
)


def train(data: Path, save: Path, flags: str) -> Path:
    argv = [str(data), "--user-dir", fsq.USER_DIR, "--save-dir", str(save), *RUN]
    fsq.main("train", [*argv, *shlex.split(flags)])
    return save / "checkpoint_last.pt"


def score(kind: str, data: Path, path: Path, beam: int = 5) -> list[str]:
    """The lines that carry results, scores in every digit that fairseq prints."""
    argv = [str(data), "--user-dir", fsq.USER_DIR, "--path", str(path), "--cpu"]
    argv += ["--num-workers", "0", "--max-tokens", "400", "--required-batch-size-multiple", "1"]
    argv += ["--model-overrides", "{'dpq_exact_logits': True}"]  # of compact files with a tie
    if kind == "generate":
        argv += ["--beam", str(beam), "--nbest", str(beam), "--max-len-b", "15"]
        text = fsq.main("generate", argv)
        lines = re.findall(r"^[HDP]-\d+\t.*$", text, re.MULTILINE)
        assert len([line for line in lines if line.startswith("H-")]) == 17 * beam
    elif kind == "eval_lm":
        text = fsq.main("eval_lm", [*argv, "--tokens-per-sample", "40", "--output-word-probs"])
        lines = re.findall(r"Loss \(base 2\): .*|\[[-\d.]+\]", text)
        assert len(lines) > 50
    elif kind == "classify":
        argv += ["--task", "text_classification", "--valid-subset", "test"]
        text = fsq.main("validate", [*argv, "--log-format", "simple"])
        lines = re.findall(r"loss [\d.]+ .* accuracy [\d.]+", text)[-1:]
        assert lines
    else:
        argv += ["--task", "masked_lm", "--valid-subset", "test", "--log-format", "simple"]
        text = fsq.main("validate", argv)
        lines = re.findall(r"loss [\d.]+ \| ppl [\d.]+", text)[-1:]  # may be logged twice
        assert lines
    return lines
