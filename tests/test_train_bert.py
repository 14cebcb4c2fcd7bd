"""The recipes of BERT as fairseq parses them, the page's commands, and fine-tuning from a masked
language model: DPQ tables are those that were pre-trained."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options

from experiments.datasets.__main__ import MODULES
from fairseq_dpq.cli import compact
from fairseq_dpq.fairseq_plugin.configs import read_record
from fairseq_dpq.methods import make_options
from helpers import fsq
from helpers.plugin_runs import last, train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "examples" / "bert" / "README.md").read_text(encoding="utf-8")
VOCABULARY = 30522
SETS = {"cola": 8551, "mrpc": 3668, "rte": 2490, "sst2": 67349, "mnli": 392702, "xnli": 392702}
LAUNCH = ("WORLD_SIZE", "RANK", "WORKERS", "BATCH", "DATA", "SAVE_DIR", "BERT", "PRETRAINED")


def _dry(command: str) -> str:
    """What a command of the page would run."""
    words = shlex.split(command)
    env = {k: v for k, v in os.environ.items() if k not in LAUNCH and "SLURM" not in k}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        env[name] = value
    done = subprocess.run(
        ["sh", *words],
        cwd=ROOT,
        env={**env, "PYTHON": "false", "DRY_RUN": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _parse(command: str) -> Any:
    words = shlex.split(_dry(command))
    words[words.index("--user-dir") + 1] = fsq.USER_DIR
    argv, sys.argv = sys.argv, words  # --user-dir is read from there
    try:
        found: Namespace = options.parse_args_and_arch(options.get_training_parser(), words[1:])
    finally:
        sys.argv = argv
    return found


def test_bert_base_is_the_papers() -> None:
    a = _parse("scripts/train.sh bert_base sx --distributed-world-size 8 --distributed-port 1")
    assert (a.encoder_layers, a.encoder_embed_dim, a.encoder_ffn_embed_dim) == (12, 768, 3072)
    assert (a.encoder_attention_heads, a.max_positions, a.tokens_per_sample) == (12, 512, 512)
    assert a.batch_size * a.update_freq[0] * 8 == 1024
    assert (a.max_update, a.total_num_update, a.warmup_updates) == (1000000, "1000000", 10000)
    assert a.lr == [0.0001] and a.untie_weights_roberta
    assert (a.dpq_K, a.dpq_D, a.dpq_share_subspaces, a.dpq_method) == (32, 128, False, "sx")
    own = make_options(a.dpq_method, {"K": a.dpq_K, "D": a.dpq_D})
    ratio = own.compression_ratio(VOCABULARY, a.encoder_embed_dim)
    assert f"{ratio:.1f}" == "36.9"
    assert not _parse("WORKERS=8 scripts/train.sh bert_base sx_tied").untie_weights_roberta


def test_small_one_has_the_ratio_of_the_page() -> None:
    a = _parse("scripts/train.sh bert_small sx --cpu")
    assert (a.encoder_layers, a.encoder_embed_dim, a.max_positions) == (4, 128, 128)
    own = make_options(a.dpq_method, {"K": a.dpq_K, "D": a.dpq_D})
    ratio = own.compression_ratio(VOCABULARY, a.encoder_embed_dim)
    row = f"| `bert_small` | 4 x 128 | 128 | {a.dpq_K}, {a.dpq_D} | {ratio:.1f} |"
    assert row in README


@pytest.mark.parametrize("name", SETS)
def test_fine_tuning_is_three_epochs_of_32(name: str) -> None:
    a = _parse(f"WORKERS=2 scripts/train.sh glue_{name} sx")
    assert a.batch_size * a.update_freq[0] * 2 == 32 and a.max_epoch == 3
    assert int(a.total_num_update) == SETS[name] * 3 // 32
    assert a.warmup_updates == int(a.total_num_update) // 10
    assert a.num_classes == (3 if "nli" in name else 2)
    assert (a.init_token, a.separator_token) == (0, 2)
    assert a.finetune_from_model == "checkpoints/bert_base_sx/checkpoint_best.pt"
    assert (a.dpq_K, a.dpq_D, a.encoder_embed_dim) == (32, 128, 768)
    small = _parse(f"BERT=small PRETRAINED=a.pt scripts/train.sh glue_{name} full_tied --cpu")
    assert (small.encoder_embed_dim, small.max_positions, small.dpq_K) == (128, 128, None)
    assert small.finetune_from_model == "a.pt" and not small.untie_weights_roberta


def test_squad_has_berts_windows() -> None:
    a = _parse("WORKERS=1 scripts/train.sh squad2 sx")
    assert (a.tokens_per_sample, a.doc_stride, a.query_length) == (384, 128, 64)
    assert (a.arch, a.task, a.criterion) == ("roberta_qa", "squad", "squad_span")


def test_commands_of_the_page_run() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [" ".join(shlex.split(line, comments=True)) for line in lines]
    scripts = [c for c in commands if re.match(r"(\w+=\S+ )*scripts/(train|score)\.sh", c)]
    assert len(scripts) >= 8
    for command in scripts:
        extra = "" if "score" in command or "--cpu" in command else " --cpu"
        assert _dry(command + extra).startswith("fairseq-")
    prepared = {c.split()[1] for c in commands if c.startswith("scripts/prepare.sh")}
    assert prepared >= {"bert", "squad1"} and any(p.startswith("glue_") for p in prepared)
    assert prepared <= set(MODULES)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and labelled pairs with one dictionary."""
    root = tmp_path_factory.mktemp("glue")
    txt = fsq.write_corpus(root, n_lines=120, n_valid=24, n_test=2, langs=("input0", "input1"))
    vocabulary = [f"{c}{i}" for c in "ab" for i in range(60)]
    (root / "dict.txt").write_text("".join(f"{word} 1\n" for word in vocabulary))
    for split in ("train", "valid"):
        first = (txt / f"{split}.input0").read_text().splitlines()
        (txt / f"{split}.label").write_text("".join(f"{len(x.split()) % 2}\n" for x in first))
    for part in ("input0", "input1", "label"):
        argv = ["--only-source", "--destdir", str(root / "bin" / part)]
        argv += [] if part == "label" else ["--srcdict", str(root / "dict.txt")]
        for split in ("train", "valid"):
            argv += [f"--{split}pref", str(txt / f"{split}.{part}")]
        fsq.main("preprocess", argv)
    return root / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("tie", [[], ["--untie-weights-roberta"]])
def test_fine_tuning_starts_from_the_pretrained_codes(
    toy: Path, tmp_path: Path, tie: list[str]
) -> None:
    sizes = "--arch roberta_base --encoder-layers 1 --encoder-embed-dim 32 --max-positions 40 "
    sizes += "--encoder-ffn-embed-dim 64 --encoder-attention-heads 2"
    model = [*sizes.split(), *tie]
    masked = "--task masked_lm --criterion masked_lm --tokens-per-sample 40 --max-tokens 320"
    # A warm-up of two updates: the table is plain at first, its codes come from k-means.
    dpq = "--dpq-K 8 --dpq-D 4"
    warm = f"{dpq} --dpq-warmup-updates 2 --dpq-ramp-updates 2"
    train(toy / "input0", tmp_path / "mlm", *masked.split(), *model, updates=6, dpq=warm)
    start = tmp_path / "mlm" / "checkpoint_last.pt"
    glue = "--task sentence_prediction --criterion sentence_prediction --num-classes 2 "
    glue += "--init-token 0 --separator-token 2 --batch-size 20 --find-unused-parameters"
    flags = [*glue.split(), *model, "--finetune-from-model", str(start)]
    train(toy, tmp_path / "still", *flags, "--lr", "0", "--max-epoch", "3", updates=1, dpq=dpq)
    before, after = torch.load(start), last(tmp_path / "still")
    path = "encoder.sentence_encoder.embed_tokens"
    for name in ("query", "values"):  # keys follow the queries of the tokens, whatever the rate is
        assert torch.equal(before["model"][f"{path}.{name}"], after["model"][f"{path}.{name}"])
    tables = [read_record(state["cfg"]["model"]).tables for state in (before, after)]
    assert tables[0][path].options == tables[1][path].options  # the schedule too
    assert tables[1][path].options["warmup_updates"] == 2
    assert tables[1][path].tied == ([] if tie else ["encoder.lm_head"])
    log = train(toy, tmp_path / "glue", *flags, updates=5, dpq=dpq)
    again = train(toy, tmp_path / "glue", *flags, updates=6, dpq=dpq)
    assert "(epoch 1 @ 5 updates)" in again  # its own checkpoint, not the pre-trained one
    accuracy = fsq.logged(log, r"valid on .* \| accuracy")
    assert len(accuracy) == 1 and 0 <= accuracy[0] <= 100
    source, target = tmp_path / "glue" / "checkpoint_last.pt", tmp_path / "compact.pt"
    assert compact.main([str(source), str(target)]) == 0
    scores = []
    for checkpoint in (source, target):
        words = shlex.split(_dry(f"DATA={toy} scripts/score.sh glue_cola {checkpoint} --cpu"))
        words[words.index("--user-dir") + 1] = fsq.USER_DIR
        out = fsq.main("validate", words[1:])
        scores.append([fsq.logged(out, rf"\| {key}")[-1] for key in ("loss", "accuracy")])
    assert scores[0] == scores[1]
    assert scores[0][1:] == fsq.logged(again, r"valid on .* \| accuracy")
