"""scripts/train.sh and score.sh: every command of the example's page, parsed as fairseq
would; the batch that an update sees; what the settings come to."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import fairseq
import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import build_optimizer, lr_scheduler
from torch.distributed.run import get_args_parser

from experiments import score
from experiments.datasets.__main__ import MODULES
from fairseq_dpq.cli import compact, quantize
from fairseq_dpq.fairseq_plugin import workers
from fairseq_dpq.methods import make_options
from helpers import fsq

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "examples" / "translation" / "README.md").read_text(encoding="utf-8")
SETS = ("iwslt15-en-vi", "iwslt15-vi-en", "wmt19", "multi30k")
LAUNCH = ("WORLD_SIZE", "RANK", "WORKERS", "BATCH", "MICRO", "DATA", "SAVE_DIR", "OUT")


def _run(script: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCH and "SLURM" not in k}
    return subprocess.run(
        ["sh", str(ROOT / "scripts" / script), *args],
        env={**clean, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env},
        text=True,
        capture_output=True,
        timeout=300,
    )


def _words(script: str, *args: str, **env: str) -> list[str]:
    done = _run(script, *args, DRY_RUN="1", **env)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    words[words.index("--user-dir") + 1] = fsq.USER_DIR
    return words


def _as_fairseq(parser_of: Any, words: list[str]) -> Namespace:
    argv, sys.argv = sys.argv, words  # --user-dir is read from there
    try:
        return options.parse_args_and_arch(parser_of(), words[1:])
    finally:
        sys.argv = argv


def _parse(*args: str, **env: str) -> Any:
    if "WORLD_SIZE" not in env and not any("world-size" in a for a in args):
        env.setdefault("WORKERS", "1")  # else the number of GPUs here
    words = _words("train.sh", *args, **env)
    assert words[0] == "fairseq-train"
    return _as_fairseq(options.get_training_parser, words)


def _page_commands() -> list[str]:
    """The lines of the page's sh blocks, continued ones joined, and the commands of its table."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    lines = filter(None, "".join(blocks).replace("\\\n", " ").splitlines())
    inline = re.findall(r"`(scripts/train\.sh [^`]+)`", README)
    return sorted({" ".join(shlex.split(line, comments=True)) for line in [*lines, *inline]})


def _check_command(command: str) -> str:
    """Parse a command of the page with the parser of what it calls; returns its program."""
    words = command.split()
    env = {}
    while "=" in words[0]:
        name, env[name] = words.pop(0).split("=")
        assert name in ("WORKERS", "SAVE_DIR", "CUDA_VISIBLE_DEVICES")
    program = words[0]
    if program == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        assert launch.no_python
        count = int(launch.nnodes.split(":")[0]) * int(launch.nproc_per_node)
        env["WORLD_SIZE"] = str(count)
        words = [launch.training_script, *launch.training_script_args]
    elif program == "srun":
        start = words.index("scripts/train.sh")
        given = dict(zip(words[1:start:2], words[2:start:2]))
        tasks_ = int(given.get("--ntasks", 0)) or int(given["--nodes"]) * int(
            given["--ntasks-per-node"]
        )
        env["SLURM_STEP_NUM_TASKS"] = str(tasks_)
        words = words[start:]
        assert words[words.index("--distributed-world-size") + 1] == str(tasks_)
    if words[0] == "scripts/train.sh":
        a = _parse(*words[1:], **env)
        assert a.source_lang in ("en", "vi")
        assert bool(a.dpq_K) == (words[2] != "full")
    elif words[0] == "scripts/score.sh":
        a = _as_fairseq(options.get_generation_parser, _words("score.sh", *words[1:], **env))
        assert a.path == words[2]
    elif words[0] == "scripts/prepare.sh":
        assert words[1] in MODULES and len(words) == 2
    else:
        tool = {"fairseq-dpq-compact": compact, "fairseq-dpq-quantize": quantize}[words[0]]
        tool.get_parser().parse_intermixed_args(words[1:])
    return program


def test_commands_of_the_page_exist() -> None:
    commands = _page_commands()
    assert len(commands) > 20
    programs = {_check_command(command) for command in commands}
    assert {"torchrun", "srun", "scripts/train.sh", "scripts/score.sh"} < programs


def test_printed_command_is_the_one_on_the_page() -> None:
    shown = re.search(r"^```\n(fairseq-train .*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert shown is not None
    words = _words("train.sh", "multi30k", "sx", WORLD_SIZE="1")
    page = shlex.split(shown.group(1))
    page[page.index("--user-dir") + 1] = fsq.USER_DIR
    assert words == page


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_update_sees_the_same_batch_with_any_number_of_workers(count: int) -> None:
    row = re.search(
        rf"^\| {count} \| (\d+), (\d+) \| (\d+), (\d+) \| (\d+), (\d+) \|$", README, re.M
    )
    assert row is not None
    page = [int(x) for x in row.groups()]
    got = []
    for name, batch in (("iwslt15-en-vi", 128), ("wmt19", 2048), ("multi30k", 2048)):
        words = _words("train.sh", name, "full", WORLD_SIZE=str(count))
        value = {a: b for a, b in zip(words, words[1:]) if a.startswith("--")}
        size = int(value.get("--batch-size", value["--max-tokens"]))
        freq = int(value["--update-freq"])
        assert size * freq * count == batch
        assert "--distributed-world-size" not in value  # torchrun says it
        got += [size, freq]
    assert got == page


def test_batch_and_micro() -> None:
    def sizes(**env: str) -> tuple:
        a = _parse("wmt19", "full", **env)
        return a.batch_size, a.max_tokens, a.update_freq, a.distributed_world_size

    assert sizes(WORKERS="8", MICRO="64") == (64, 4096, [4], 8)
    assert sizes(WORKERS="6", BATCH="1920") == (80, 5120, [4], 6)
    assert sizes(WORKERS="1", MICRO="4") == (4, 1024, [512], 1)  # holds a pair of 250 pieces
    done = _run("train.sh", "wmt19", "sx", DRY_RUN="1", WORKERS="8")
    assert done.stderr == "train.sh: 2048 sentences an update = 8 worker(s) x 128 x 2\n"
    own = _run("train.sh", "wmt19", "sx", "--update-freq", "3", DRY_RUN="1", WORKERS="8")
    assert own.stderr == ""


def test_rows_have_the_compression_ratios_of_the_page() -> None:
    entries = {"iwslt15-en-vi": 17192, "iwslt15-vi-en": 7710, "wmt19": 32000, "multi30k": 8000}
    for name in SETS:
        for method in ("sx", "vq"):
            a = _parse(name, method)
            sizes = {"K": a.dpq_K, "D": a.dpq_D, "share_subspaces": a.dpq_share_subspaces}
            dpq = make_options("sx", sizes)
            dim = getattr(a, "encoder_embed_dim", 512)
            cr = dpq.compression_ratio(entries[name], dim)
            row = f"| `scripts/train.sh {name} {method}` | {a.dpq_K}, {a.dpq_D} | {cr:.1f} |"
            assert row in README
            paper = re.search(re.escape(row) + r" ([0-9.]+) \|", README)
            if name.startswith("iwslt15"):
                assert paper is not None and cr == pytest.approx(float(paper.group(1)), rel=6e-3)
            assert a.dpq_method == method and cr >= 14
            assert name != "multi30k" or cr >= 20


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """en-de with a joint dictionary and raw references, as the prepare scripts leave them."""
    root = tmp_path_factory.mktemp("nmt")
    txt = fsq.write_corpus(root, n_lines=60, n_valid=9, n_test=11, langs=("en", "de"))
    argv = ["-s", "en", "-t", "de", "--joined-dictionary", "--destdir", str(root / "bin")]
    for split in fsq.SPLITS:
        argv += [f"--{split}pref", str(txt / split)]
    fsq.main("preprocess", argv)
    (root / "bin" / "raw").mkdir()
    (root / "bin" / "raw" / "test.de").write_text((txt / "test.de").read_text())
    return root / "bin"


def _built(data: Path, *args: str) -> tuple:
    a = _parse(*args, "--source-lang", "en", "--target-lang", "de", DATA=str(data))
    cfg = convert_namespace_to_omegaconf(a)
    return cfg, tasks.setup_task(cfg.task).build_model(cfg.model)


def _rates(cfg: Any, updates: list[int]) -> list[float]:
    """Learning rates after so many updates."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = build_optimizer(cfg.optimizer, [weight])
    schedule = lr_scheduler.build_lr_scheduler(cfg.lr_scheduler, optimizer)
    schedule.step_begin_epoch(9)
    return [schedule.step_update(n) for n in updates]


def test_iwslt15_is_the_attention_lstm(toy: Path) -> None:
    cfg, model = _built(toy, "iwslt15-en-vi", "sx")
    encoder, decoder = model.encoder, model.decoder
    assert (encoder.lstm.num_layers, encoder.lstm.hidden_size) == (2, 512)
    assert encoder.lstm.bidirectional and encoder.output_units == 1024
    assert [cell.hidden_size for cell in decoder.layers] == [512, 512]
    assert decoder.attention.input_proj.weight.shape == (1024, 512)
    assert decoder.layers[0].input_size == 1024  # input feeding
    assert decoder.dropout_out_module.p == encoder.dropout_in_module.p == 0.2
    table = encoder.embed_tokens
    assert (table.config.K, table.config.D, table.method.name) == (32, 32, "sx")
    assert isinstance(decoder.embed_tokens, torch.nn.Embedding)
    o = cfg.optimization
    assert (o.max_update, o.clip_norm, o.sentence_avg) == (12000, 5.0, True)
    rates = _rates(cfg, [0, 8999, 9000, 9999, 10000, 11000, 11999])
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125, 0.125]


def test_wmt19_is_transformer_base_with_sm3(toy: Path) -> None:
    cfg, model = _built(toy, "wmt19", "vq")
    layer = model.encoder.layers[0]
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (6, 6)
    assert (layer.fc1.in_features, layer.fc1.out_features) == (512, 2048)
    assert layer.self_attn.num_heads == 8
    assert layer.dropout_module.p == 0.1
    table = model.encoder.embed_tokens
    assert (table.config.K, table.config.D, table.method.name) == (32, 128, "vq")
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
    assert (cfg.optimizer._name, cfg.optimizer.momentum) == ("sm3", 0.9)
    assert cfg.optimization.max_update == 250000
    # The rate of the next update: (5,000 / 10,000)^2 of 0.1, then 0.1.
    assert _rates(cfg, [4999, 9999, 200000]) == pytest.approx([0.025, 0.1, 0.1])


def test_multi30k_all_embeddings_are_one_table(toy: Path) -> None:
    _, model = _built(toy, "multi30k", "sx", "--share-all-embeddings", "--dpq-embeddings", "all")
    assert model.encoder.embed_tokens is model.decoder.embed_tokens
    table = model.encoder.embed_tokens
    assert (table.config.K, table.config.D, table.config.schedule) == (8, 64, "warmup")
    rows = [name for name, p in model.named_parameters() if len(p) == table.num_embeddings]
    assert [name.rsplit(".", 1)[1] for name in rows] == ["query"]


def test_multi30k_vq_moves_centroids_by_average(toy: Path) -> None:
    _, model = _built(toy, "multi30k", "vq")
    config = model.encoder.embed_tokens.config
    assert (config.K, config.D, config.schedule) == (8, 64, "warmup")
    assert (config.ema_decay, config.commitment) == (0.99, 0.5)


def test_starts_on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n in LAUNCH or "SLURM" in n]:
        monkeypatch.delenv(name)
    cfg = convert_namespace_to_omegaconf(_parse("multi30k", "sx", "--cpu", WORKERS="2"))
    with pytest.raises(ValueError, match="torchrun --nproc_per_node 2 --no_python fairseq-train"):
        workers.prepare(cfg)

    flags = shlex.split("--cpu --distributed-world-size 16 --distributed-port 29500")
    cfg = convert_namespace_to_omegaconf(_parse("wmt19", "sx", *flags, SLURM_STEP_NUM_TASKS="16"))
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1\necho node2\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    monkeypatch.setenv("SLURM_PROCID", "11")
    workers.prepare(cfg)
    dt = cfg.distributed_training
    assert (dt.distributed_world_size, dt.distributed_rank) == (16, 11)
    assert dt.distributed_init_method == "tcp://node1:29500"
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (128, [1])


# The recipe on toy data: a smaller model, and no dropout, whose masks depend on the process.
TOY = (
    "--encoder-layers 1 --decoder-layers 1 --dpq-D 16 --dropout 0 --cpu --num-workers 0 "
    "--max-update 4 --disable-validation --log-interval 1 --lr 0.01 --warmup-updates 2 "
    "--total-num-update 8"
)
if fairseq.__version__ == "0.12.2":  # its pytorch_ddp asks for it
    TOY += " --find-unused-parameters"
TORCHRUN = "torchrun --nproc_per_node {} --no_python scripts/train.sh multi30k {}"


def _launch(toy: Path, save: Path, commands: list[tuple[str, dict[str, str]]]) -> str:
    """Start all commands at once, each with its environment, as lines of the page; all output."""
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCH and "SLURM" not in k}
    clean |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "BATCH": "256", "MICRO": "128"}
    clean |= {"DATA": str(toy), "SAVE_DIR": str(save)}
    processes = []
    for command, env in commands:
        words = [*command.split(), *TOY.split()]
        words[0] = fsq.script(words[0]) if words[0] == "torchrun" else words[0]
        processes.append(
            subprocess.Popen(
                words,
                cwd=ROOT,
                env={**clean, **env},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        outputs = [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert not any(p.returncode for p in processes), "\n".join(outputs)
    return "\n".join(outputs)


@pytest.fixture(scope="module")
def alone(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By method: the log and the weights of one process, which takes --update-freq 2."""
    runs: dict[str, tuple[str, dict]] = {}

    def get(method: str) -> tuple[str, dict]:
        if method not in runs:
            save = tmp_path_factory.mktemp(f"alone-{method}")
            text = _launch(toy, save, [(f"scripts/train.sh multi30k {method}", {})])
            assert "256 tokens an update = 1 worker(s) x 128 x 2" in text
            runs[method] = text, fsq.weights(save / "checkpoint_last.pt")
        return runs[method]

    return get


@pytest.mark.parametrize(
    ("way", "method"), [("torchrun", "sx"), ("two nodes", "vq"), ("srun", "sx")]
)
def test_two_workers_train_as_one_process(
    toy: Path, tmp_path: Path, alone: Any, way: str, method: str
) -> None:
    """Every way of the page to start workers, with two CPU processes. srun itself is not at hand:
    what it starts is, with its variables and a scontrol that names this host."""
    port = fsq.free_port()
    if way == "torchrun":
        commands = [(TORCHRUN.format(f"2 --master_port {port}", method), {})]
    elif way == "two nodes":
        nodes = f"--nnodes 2 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port}"
        line = TORCHRUN.format(1, method).replace("torchrun", f"torchrun {nodes}")
        commands = [(line, {})] * 2
    else:
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
        (tmp_path / "scontrol").chmod(0o755)
        line = f"scripts/train.sh multi30k {method} --distributed-world-size 2"
        step = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLURM_STEP_NODELIST": "node1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "2",
        }
        commands = [
            (f"{line} --distributed-port {port}", {**step, "SLURM_PROCID": r, "SLURM_LOCALID": r})
            for r in ("0", "1")
        ]
    text = _launch(toy, tmp_path / "two", commands)
    assert "256 tokens an update = 2 worker(s) x 128 x 1" in text
    assert text.count("training on 2 devices") == 1, "rank 1 must not train on its own"

    log, one = alone(method)
    curves = [fsq.logged(t, r"train_inner \| .*? loss") for t in (text, log)]
    assert len(curves[0]) == len(curves[1]) == 4 and len(set(curves[1])) > 1
    torch.testing.assert_close(*map(torch.tensor, curves), rtol=0, atol=2e-3)
    two = fsq.weights(tmp_path / "two" / "checkpoint_last.pt")
    assert one.keys() == two.keys()
    for key in fsq.learned(one):
        torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=2e-4, msg=key)


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        ("wmt14 sx", {}, "RECIPE 'wmt14' is unknown; choose "),
        ("wmt19 pq", {}, "METHOD 'pq' is unknown to recipe wmt19; choose full, sx or vq"),
        ("iwslt15-vi-en sx", {"DATA": "nowhere"}, "no dict.vi.txt in DATA 'nowhere'; run: "
         "scripts/prepare.sh iwslt15"),
        ("wmt19 sx", {"DATA": "nowhere"}, "run: scripts/prepare.sh wmt19"),
        ("multi30k sx", {"DATA": "nowhere"}, "run: scripts/prepare.sh multi30k"),
        ("wmt19 sx", {"WORKERS": "3"}, "3 workers do not divide BATCH 2048 (sentences)"),
        ("wmt19 sx", {"WORKERS": "2", "BATCH": "2042"}, "take another BATCH, e.g. 2048"),
        ("multi30k sx", {"WORKERS": "32"}, "64 tokens for a worker at once do not hold"),
        ("wmt19 sx", {"WORKERS": "8", "SLURM_JOB_ID": "7"}, "torchrun --nproc_per_node 8"),
        ("wmt19 sx", {"WORKERS": "two"}, "WORKERS 'two' is not a positive number"),
        ("wmt19 sx", {"WORKERS": "1", "MICRO": "0"}, "MICRO '0' is not a positive number"),
        ("wmt19 sx", {"WORKERS": "4", "WORLD_SIZE": "2"}, "WORKERS 4, but 2 are started"),
        ("wmt19 sx", {"SLURM_STEP_NUM_TASKS": "8"},
         "--distributed-world-size 8 --distributed-port 29500"),
    ],
)  # fmt: skip
def test_refusals(args: str, env: dict[str, str], message: str) -> None:
    env = {**env, "DRY_RUN": "0" if "DATA" in env else "1"}
    done = _run("train.sh", *args.split(), **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def _ran(script: str, log: Path, *args: str, **env: str) -> tuple[str, list[list[str]]]:
    """The command that a script prints, and what it has an interpreter run."""
    fake = log.with_suffix(".sh")
    fake.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" END >> '{log}'\n")
    fake.chmod(0o755)
    done = _run(script, *args, **{**env, "PYTHON": str(fake)})
    assert done.returncode == 0, done.stderr
    runs = [part.splitlines() for part in log.read_text().split("END\n")[:-1]]
    return done.stdout, [run for run in runs if run[0] == "-m"]


def test_runs_what_it_prints_and_scores_it(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = "multi30k sx --encoder-layers 1 --decoder-layers 1 --dpq-D 16 --max-update 2 --cpu"
    printed, runs = _ran(
        "train.sh", tmp_path / "train", *tiny.split(), "--num-workers", "0",
        DATA=str(toy), SAVE_DIR=str(tmp_path), WORKERS="1",
    )  # fmt: skip
    assert runs == [["-m", "fairseq_cli.train", *shlex.split(printed)[1:]]]
    words = runs[0][2:]
    words[words.index("--user-dir") + 1] = fsq.USER_DIR
    log = fsq.main("train", words)
    assert re.search(r"encoder\.embed_tokens: \d+ x 128 -> DPQ sx K=8 D=16; compression", log)
    assert "decoder.embed_tokens: not replaced" in log

    printed, runs = _ran(
        "score.sh", tmp_path / "score", "multi30k", str(tmp_path / "checkpoint_best.pt"),
        "--cpu", "--num-workers", "0", "--beam", "2", DATA=str(toy),
    )  # fmt: skip
    (words,) = runs
    at = words.index("--")
    assert words[:3] == ["-m", "experiments.score", "bleu"] and "--tokenized-reference" not in words
    flags = words[at + 1 :]
    flags[flags.index("--user-dir") + 1] = fsq.USER_DIR
    fsq.main("generate", flags)
    output = Path(words[words.index("--output") + 1])
    assert len(score.read_translations(output)) == 11
    capsys.readouterr()
    assert score.main(words[2:at]) == 0  # of the translations that are there
    found = json.loads(capsys.readouterr().out)
    assert 0 <= found["BLEU"] <= 100 and "|tok:13a|smooth:exp|version:" in found["signature"]


def test_scores_are_json(toy: Path, tmp_path: Path) -> None:
    """The whole script: what fairseq says is on standard error, JSON alone on standard output."""
    tiny = "--encoder-layers 1 --decoder-layers 1 --max-update 1 --num-workers 0 --cpu"
    env = {"DATA": str(toy), "SAVE_DIR": str(tmp_path), "WORKERS": "1"}
    done = _run("train.sh", "multi30k", "full", *tiny.split(), **env)
    assert done.returncode == 0, done.stderr
    done = _run("score.sh", "multi30k", str(tmp_path / "checkpoint_best.pt"), "--cpu", **env)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"BLEU", "signature"}
    assert "fairseq-generate" in done.stderr


def test_iwslt15_is_scored_twice(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "a.pt").write_bytes(b"PK")  # how a checkpoint begins
    (tmp_path / "raw" / "valid.detok.vi").touch()
    _, runs = _ran(
        "score.sh", tmp_path / "log", "iwslt15-en-vi", str(tmp_path / "a.pt"),
        "--gen-subset", "valid", DATA=str(tmp_path), OUT="o",
    )  # fmt: skip
    raw = f"{tmp_path}/raw/valid"
    (words,) = runs
    assert words[2 : words.index("--")] == [
        "bleu", "--output", "o/generate-valid.txt", "--reference", f"{raw}.detok.vi",
        "--tokenized-reference", f"{raw}.vi",
    ]  # fmt: skip
    missing = _run("score.sh", "wmt19", str(tmp_path / "a.pt"), DATA=str(tmp_path))
    assert missing.returncode == 2
    assert "raw/test.de; run: scripts/prepare.sh wmt19, or set DATA" in missing.stderr


def test_output_lies_beside_the_first_checkpoint() -> None:
    for given, out in (("v1.pt2/best.pt", "v1.pt2/best"), ("a.ptb/b.pt:c/d.pt", "a.ptb/b")):
        words = _words("score.sh", "multi30k", given)
        assert words[words.index("--results-path") + 1] == out
