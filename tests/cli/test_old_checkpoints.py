"""Full checkpoints as older versions, GPUs and frozen vectors leave them: fairseq loads what
fairseq-dpq-quantize makes of them, and with a code for every symbol nothing is lost."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_dpq import CompactEmbedding
from fairseq_dpq.cli import compact, quantize
from fairseq_dpq.fairseq_plugin.configs import read_record
from helpers.tool_runs import ROBERTA, TF, TLM, train
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow


def _loaded(path: Path) -> Any:
    from fairseq import checkpoint_utils

    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return model.eval()


def _quantized(source: Path, *flags: str) -> Path:
    """Every symbol has a code of its own."""
    target = source.with_name("small.pt")
    state = load(source)
    (n,) = {len(w) for key, w in state["model"].items() if key.endswith("embed_tokens.weight")}
    argv = [str(source), str(target), "--dpq-K", str(n), "--dpq-D", "1", *flags]
    assert quantize.main([*argv, "--debug"]) == 0
    return target


def _tables(path: Path) -> dict[str, tuple[list[str], list[str]]]:
    record = read_record(load(path)["cfg"]["model"])
    return {path: (table.aliases, table.tied) for path, table in record.tables.items()}


def _torn(state: dict) -> None:
    """A copy of its own for each name, as fairseq saves a model from a GPU or in float16."""
    state["model"] = {key: tensor.clone() for key, tensor in state["model"].items()}


def _flat_args(cfg: dict, arch: str) -> Namespace:
    """The flags of a run as fairseq 0.9 saved them."""
    flat: dict[str, Any] = {}
    names = {}
    for group, part in cfg.items():
        if part is not None and not isinstance(part, str):
            part = dict(vars(part) if isinstance(part, Namespace) else part)
            names[group] = part.pop("_name", None)
            flat.update({k: v for k, v in part.items() if not k.startswith("dpq_")})
    flat.update({group: name for group, name in names.items() if name and group != "model"})
    return Namespace(**{**flat, "arch": arch})


@pytest.mark.parametrize("torn", [False, True], ids=["", "torn"])
def test_roberta_under_its_old_names(lm, tmp_path, torn) -> None:
    source = train(lm, tmp_path, ROBERTA)
    full = _loaded(source)
    state = load(source)
    if torn:
        _torn(state)
    names = {key: key.replace("encoder.", "decoder.", 1) for key in state["model"]}
    assert "decoder.sentence_encoder.embed_tokens.weight" in names.values()
    state["model"] = {names[key]: tensor for key, tensor in state["model"].items()}
    state["args"], state["cfg"] = _flat_args(state["cfg"], "roberta_base"), None
    torch.save(state, source)
    small = _quantized(source)
    path = "encoder.sentence_encoder.embed_tokens"
    assert _tables(small) == {path: ([], ["encoder.lm_head"])}
    model = _loaded(small)
    assert isinstance(model.encoder.sentence_encoder.embed_tokens, CompactEmbedding)
    tokens = torch.arange(4, 44).view(4, 10)
    with torch.no_grad():
        assert torch.allclose(model(tokens)[0], full(tokens)[0], atol=1e-5)


@pytest.mark.parametrize("flags", ["", "--trainable"])
def test_args_of_a_model_with_a_dataclass(lm, tmp_path, flags) -> None:
    """fairseq makes a config of `args` at each load, in which only what it knows is kept."""
    source = train(lm, tmp_path, TLM + "--share-decoder-input-output-embed")
    state = load(source)
    state["args"], state["cfg"] = _flat_args(state["cfg"], "transformer_lm"), None
    torch.save(state, source)
    full = _loaded(source)  # that is how it is without DPQ
    small = _quantized(source, *flags.split())
    assert load(small)["args"] is None
    model = _loaded(small)
    tokens = torch.arange(4, 44).view(4, 10)
    with torch.no_grad():
        got, expected = model(tokens)[0], full(tokens)[0]
    assert not isinstance(model.decoder.embed_tokens, torch.nn.Embedding)
    if not flags:
        assert torch.allclose(got, expected, atol=1e-5)
    else:  # a DPQ checkpoint of such a file becomes compact, and the same model again
        exact = ["--exact-logits", "--debug"]
        assert compact.main([str(small), str(tmp_path / "compact.pt"), *exact]) == 0
        with torch.no_grad():
            assert torch.equal(_loaded(tmp_path / "compact.pt")(tokens)[0], got)


def test_args_that_fairseq_does_not_know(lm, tmp_path, capsys) -> None:
    source = train(lm, tmp_path, TLM)
    state = load(source)
    state["args"], state["cfg"] = _flat_args(state["cfg"], "my_own_model"), None
    torch.save(state, source)
    argv = [str(source), str(tmp_path / "small.pt"), "--dpq-K", "4", "--dpq-D", "4"]
    assert quantize.main(argv) == 2
    said = capsys.readouterr().err
    assert "--arch my_own_model" in said and "import the module that registers them" in said
    assert not (tmp_path / "small.pt").exists()


@pytest.mark.parametrize("shared", ["share-all-embeddings", "share-decoder-input-output-embed", ""])
def test_equal_numbers_are_a_tie_only_where_the_flags_say_so(joined, tmp_path, shared) -> None:
    """All three tables equal and apart: by the flags, one, two or three of them are meant."""
    source = train(joined, tmp_path, TF + (f" --{shared}" if shared else ""))
    state = load(source)
    encoder, decoder, output = "encoder.embed_tokens", "decoder.embed_tokens", "output_projection"
    table = state["model"][f"{encoder}.weight"]
    for name in (decoder, f"decoder.{output}"):
        state["model"][f"{name}.weight"] = table
    _torn(state)
    torch.save(state, source)
    full = _loaded(source)
    small = _quantized(source, "--embeddings", "all")
    expected: dict[str, tuple[list[str], list[str]]] = {encoder: ([], []), decoder: ([], [])}
    if shared == "share-all-embeddings":
        expected = {encoder: ([decoder], [f"decoder.{output}"])}
    elif shared:
        expected[decoder] = ([], [f"decoder.{output}"])
    assert _tables(small) == expected
    assert (f"decoder.{output}.weight" in load(small)["model"]) == (not shared)
    tokens = torch.arange(4, 24).view(2, 10)
    lengths = torch.tensor([10, 10])
    with torch.no_grad():
        got, wanted = (m(tokens, lengths, tokens)[0] for m in (_loaded(small), full))
    assert torch.allclose(got, wanted, atol=1e-5)


def test_tables_that_a_model_shares_by_a_flag_of_its_own(joined, tmp_path) -> None:
    """The tool cannot know such a flag and quantises a torn table twice; the model loads it."""
    from fairseq import models, tasks
    from omegaconf import OmegaConf

    source = train(joined, tmp_path, TF + " --share-all-embeddings")
    state = load(source)
    full = _loaded(source)
    _torn(state)
    state["cfg"]["model"].share_all_embeddings = False
    torch.save(state, source)
    small = load(_quantized(source, "--embeddings", "all"))
    cfg = small["cfg"]["model"]
    assert len(read_record(cfg).tables) == 2
    cfg.share_all_embeddings = True  # what the flag of its own does
    task = tasks.setup_task(OmegaConf.create(small["cfg"]["task"]), from_checkpoint=True)
    model = models.build_model(cfg, task, True).eval()
    model.load_state_dict(small["model"])
    assert model.encoder.embed_tokens is model.decoder.embed_tokens
    tokens, lengths = torch.arange(4, 24).view(2, 10), torch.tensor([10, 10])
    with torch.no_grad():
        got, wanted = (m(tokens, lengths, tokens)[0] for m in (model, full))
    assert torch.allclose(got, wanted, atol=1e-5)
