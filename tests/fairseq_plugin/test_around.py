"""What surrounds training: precision, weight averaging, ensembles, hub, TorchScript, hydra."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from helpers import fsq
from helpers.plugin_runs import LM, TRANSFORMER, last, train
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow

SX = "--dpq-K 8 --dpq-D 4 --dpq-embeddings all "
TIED = [*TRANSFORMER, "--share-decoder-input-output-embed"]
HALF = pytest.mark.skipif(
    not fsq.torch_at_least(2, 1), reason="this torch has no float16 arithmetic on CPU"
)
GENERATE = ["--user-dir", fsq.USER_DIR, "--cpu", "--batch-size", "8", "--beam", "2"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--fp16", marks=HALF),
        pytest.param("--memory-efficient-fp16", marks=HALF),
        "--bf16",
        "--amp",
        "--checkpoint-activations",
        "--quant-noise-pq 0.1 --quant-noise-pq-block-size 4",
    ],
)
@pytest.mark.parametrize("method", ["sx", "vq"])
def test_runs_with(corpus, tmp_path, flags: str, method: str) -> None:
    dpq = SX + f"--dpq-method {method} --dpq-schedule paper"
    log = train(corpus, tmp_path, *TIED, *flags.split(), updates=6, dpq=dpq)
    losses = fsq.logged(log, r"train_inner \| .*? loss")
    assert losses[-1] < losses[0]
    model = last(tmp_path)["model"]
    assert model["encoder.embed_tokens.norm_updates"].item() >= 5
    out = fsq.main("generate", [str(corpus), *GENERATE, "--path", tmp_path / "checkpoint_last.pt"])
    assert len(re.findall(r"^H-\d+", out, re.M)) == 21


@HALF
@pytest.mark.parametrize("flag", ["--fp16", "--memory-efficient-fp16"])
def test_a_loss_scale_that_overflows_on_cpu_is_halved(corpus, tmp_path, flag) -> None:
    flags = [*TIED, flag, "--fp16-init-scale", str(2**24)]
    log = train(corpus, tmp_path, *flags, updates=2, dpq=SX)
    assert "gradient overflow detected" in log
    assert last(tmp_path)["optimizer_history"][-1]["num_updates"] == 2
    assert last(tmp_path)["last_optimizer_state"]["loss_scale"] < 2**24


@HALF
def test_data_dependent_starts_reach_the_fp16_copies(corpus, tmp_path) -> None:
    """The k-means start sets keys; an fp16 optimiser must not write its old copies back."""
    flags = [*TRANSFORMER, "--fp16", "--lr", "1e-30", "--optimizer", "sgd"]
    dpq = "--dpq-K 8 --dpq-D 4 --dpq-method vq --dpq-warmup-updates 1"
    train(corpus, tmp_path, *flags, updates=4, dpq=dpq)
    model = last(tmp_path)["model"]
    query, values = model["encoder.embed_tokens.query"], model["encoder.embed_tokens.values"]
    points = query[4:].view(-1, 4, 8).transpose(0, 1)
    error = torch.cdist(points, values).amin(-1).pow(2).mean() / points.pow(2).sum(-1).mean()
    assert error < 0.8  # k-means centroids; random ones are worse than none at all


def test_ema_weights(corpus, tmp_path) -> None:
    flags = [*TIED, "--store-ema", "--ema-decay", "0.5"]
    train(corpus, tmp_path, *flags, updates=4, dpq=SX)
    state = last(tmp_path)
    ema, model = state["extra_state"]["ema"], state["model"]
    assert ema.keys() == model.keys()
    key = "encoder.embed_tokens.query"
    assert not torch.equal(ema[key], model[key])
    resumed = train(corpus, tmp_path, *flags, updates=5, dpq=SX)
    assert "Loading EMA from checkpoint" in resumed


def test_averaged_checkpoints_and_ensembles(corpus, tmp_path) -> None:
    """The mean of two training checkpoints, and both of them as an ensemble, both generate."""
    files = []
    for seed in ("1", "2"):
        train(corpus, tmp_path / seed, *TIED, "--seed", seed, updates=2, dpq=SX)
        files.append(tmp_path / seed / "checkpoint_last.pt")
    states = [load(f) for f in files]
    for key, value in states[0]["model"].items():
        value.add_(states[1]["model"][key]).div_(2)
    torch.save(states[0], tmp_path / "mean.pt")
    for path in (str(tmp_path / "mean.pt"), ":".join(map(str, files))):
        out = fsq.main("generate", [str(corpus), *GENERATE, "--path", path])
        assert len(re.findall(r"^H-\d+", out, re.M)) == 21


def test_hub_interface(corpus, tmp_path) -> None:
    from fairseq.models.transformer import TransformerModel

    train(corpus, tmp_path, *TIED, updates=2, dpq=SX)
    hub = TransformerModel.from_pretrained(
        str(tmp_path), "checkpoint_last.pt", data_name_or_path=str(corpus)
    )
    assert isinstance(hub.translate("a1 a2 a3", beam=2), str)


@pytest.mark.parametrize("method", ["sx", "vq"])
def test_inference_computes_codes_once(corpus, tmp_path, method) -> None:
    """`prepare_for_inference_`, as fairseq's commands call it, keeps the codes of all words."""
    from fairseq import checkpoint_utils

    train(corpus, tmp_path, *TRANSFORMER, updates=2, dpq=f"{SX} --dpq-method {method}")
    (model,), cfg, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(tmp_path / "checkpoint_last.pt")]
    )
    table = model.encoder.embed_tokens
    tokens = torch.arange(len(table.query))
    expected = copy.deepcopy(table).eval()(tokens)
    model.prepare_for_inference_(cfg)
    assert not model.training
    assert torch.equal(table._frozen_codes, table.codes())
    assert torch.equal(table(tokens), expected)
    table.train()
    assert table._frozen_codes is None


@pytest.mark.parametrize("flags", [TRANSFORMER, TIED], ids=["untied", "tied"])
def test_torchscript(corpus, tmp_path, flags) -> None:
    """The scripted model has compact tables and gives the same logits."""
    if not hasattr(torch, "_nested_tensor_from_mask_left_aligned"):
        pytest.skip("fairseq's own transformer names what this torch does not have")
    from fairseq import checkpoint_utils

    train(corpus, tmp_path, *flags, updates=2, dpq=SX)
    (model,), _ = checkpoint_utils.load_model_ensemble([str(tmp_path / "checkpoint_last.pt")])
    model.eval()
    scripted = torch.jit.script(model)
    names = [m.original_name for m in scripted.modules()]
    assert "CompactEmbedding" in names and "FairseqDPQEmbedding" not in names
    tokens = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 1]])
    lengths = torch.tensor([4, 3])
    with torch.no_grad():
        expected = model(tokens, lengths, tokens)[0]
        # TorchScript fuses other operations of the stock model, which changes their rounding.
        torch.testing.assert_close(scripted(tokens, lengths, tokens)[0], expected)
        for side in ("encoder", "decoder"):
            table, compact = getattr(model, side).embed_tokens, getattr(scripted, side).embed_tokens
            assert torch.equal(table(tokens), compact(tokens))


def test_hydra_console_script(lm, tmp_path) -> None:
    """Under hydra the plugin must be imported before the config is composed."""
    config = tmp_path / "conf"
    config.mkdir()
    (config / "lm.yaml").write_text(
        "# @package _group_\n"
        "common: {cpu: true, log_format: simple, log_interval: 1, no_progress_bar: true}\n"
        f"task: {{_name: language_modeling, data: {lm}, tokens_per_sample: 40,\n"
        "  dpq_K: 8, dpq_D: 4}\n"
        "model: {_name: transformer_lm, decoder_layers: 1, decoder_embed_dim: 32,\n"
        "  decoder_input_dim: 32, decoder_output_dim: 32, decoder_ffn_embed_dim: 64,\n"
        "  decoder_attention_heads: 2}\n"
        "criterion: {_name: cross_entropy}\n"
        "optimizer: {_name: adam}\n"
        "lr_scheduler: {_name: fixed}\n"
        "dataset: {max_tokens: 320, num_workers: 0}\n"
        f"checkpoint: {{save_dir: {tmp_path}/ck}}\n"
        "optimization: {max_update: 2, lr: [0.005]}\n"
    )
    argv = ["--config-dir", config, "--config-name", "lm", "+task.dpq_method=vq"]
    argv += ["common.user_dir=fairseq_dpq", f"hydra.run.dir={tmp_path}/run"]
    done = fsq.run(["python", "-m", "fairseq_dpq.cli.hydra_train", *argv], cwd=tmp_path)
    assert "DPQ vq K=8 D=4" in done.stdout + done.stderr
    assert "decoder.embed_tokens.query" in last(tmp_path / "ck")["model"]
    command = [str(lm), "--user-dir", fsq.USER_DIR, "--cpu", "--tokens-per-sample", "40"]
    out = fsq.main("eval_lm", [*command, "--path", str(tmp_path / "ck" / "checkpoint_last.pt")])
    assert "Evaluated" in out


@pytest.mark.parametrize("sign", ["", "+"])
def test_hydra_with_the_task_on_the_command_line(tmp_path, sign: str) -> None:
    argv = ["task=language_modeling", f"{sign}task.dpq_K=8", "--cfg", "job"]
    done = fsq.run(["python", "-m", "fairseq_dpq.cli.hydra_train", *argv], cwd=tmp_path)
    assert "  _name: language_modeling\n" in done.stdout and "  dpq_K: 8\n" in done.stdout


def test_help_of_hydra_is_help(tmp_path) -> None:
    done = fsq.run(["python", "-m", "fairseq_dpq.cli.hydra_train", "--help"], cwd=tmp_path)
    assert done.stdout.startswith("hydra_train is powered by Hydra.") and done.stderr == ""


def test_stock_fairseq_refuses_a_dpq_checkpoint(lm, tmp_path) -> None:
    """Stock fairseq fails to load a DPQ checkpoint instead of loading it without its tables, and
    says what is missing. Before torch 2.6 the checkpoint itself imports the plugin."""
    train(lm, tmp_path, *LM, updates=1, dpq=SX)
    command = ["fairseq-eval-lm", lm, "--path", tmp_path / "checkpoint_last.pt", "--cpu"]
    refused = fsq.torch_at_least(2, 6)
    done = fsq.run([*command, "--tokens-per-sample", "40"], ok=not refused)
    assert ("DPQ_checkpoint__add__user_dir_fairseq_dpq" in done.stderr) == refused


def test_adaptive_softmax_on_top_of_a_dpq_input(lm, tmp_path) -> None:
    """Only a tied adaptive softmax is refused; an untied one works."""
    flags = [*LM, "--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "20,40"]
    log = train(lm, tmp_path, *flags, "--ddp-backend", "legacy_ddp", updates=4, dpq=SX)
    losses = fsq.logged(log, r"train_inner \| .*? loss")
    assert losses[-1] < losses[0]
    assert "decoder.embed_tokens.query" in last(tmp_path)["model"]


def test_a_task_without_a_dataclass_and_its_nested_models(corpus, tmp_path) -> None:
    """multilingual_translation has one model for each pair and passes each to the criterion."""
    flags = ["--task", "multilingual_translation", "--lang-pairs", "src-tgt"]
    flags += ["--arch", "multilingual_transformer", *TRANSFORMER[2:]]
    log = train(corpus, tmp_path, *flags, updates=3, dpq=SX + "--dpq-method vq")
    path = "models.src-tgt.encoder.embed_tokens"
    assert f"{path}: 64 x 32 -> DPQ vq K=8 D=4" in log
    assert f"{path}.values" in last(tmp_path)["model"]
    assert fsq.logged(log, r"dpq_regularizer")[-1] > 0
    argv = [str(corpus), *GENERATE, "--path", str(tmp_path / "checkpoint_last.pt")]
    argv += ["--task", "multilingual_translation", "--lang-pairs", "src-tgt"]
    out = fsq.main("generate", [*argv, "--source-lang", "src", "--target-lang", "tgt"])
    assert len(re.findall(r"^H-\d+", out, re.M)) == 21
