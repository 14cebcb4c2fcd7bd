"""Hugging Face models: logits, generation, saving and loading by their own functions, ties."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_dpq import (
    CodesLinear,
    CompactEmbedding,
    compact,
    compress,
    load_compact,
    save_compact,
)

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def gpt2(tied: bool = True) -> Any:
    """1000 x 64, two layers, the head tied to the input table."""
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": tied}
    config = transformers.GPT2Config(vocab_size=1000, **ends, **sizes)
    return transformers.GPT2LMHeadModel(config).eval()


def ids() -> torch.Tensor:
    return torch.randint(2, 1000, (2, 9), generator=torch.Generator().manual_seed(1))


def generated(model: Any) -> torch.Tensor:
    mask = torch.ones_like(ids())
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    return model.generate(ids(), attention_mask=mask, **how)


@pytest.fixture(scope="module")
def small() -> Any:
    model = gpt2()
    compress(model, K=32, min_rows=500)
    return model


@pytest.fixture(scope="module")
def folder(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    small.save_pretrained(path)
    return path


@torch.no_grad()
def test_logits_and_generation_are_those_of_the_dense_table(small: Any) -> None:
    dense = gpt2()
    dense.transformer.wte.weight.copy_(small.transformer.wte.dense())
    assert dense.lm_head.weight is dense.transformer.wte.weight
    assert torch.allclose(small(ids()).logits, dense(ids()).logits, atol=1e-5)
    assert torch.equal(generated(small), generated(dense))
    full = gpt2()
    before = sum(p.numel() for p in full.parameters())
    assert sum(p.numel() for p in small.parameters()) == before - 1000 * 64


@torch.no_grad()
def test_save_pretrained_and_from_pretrained(small: Any, folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    full = sum(p.numel() for p in gpt2().parameters()) * 4
    # 1000 rows of 32 codes of 5 bits, 32 x 64 values; the header takes some 3 kB
    assert size < full - 256_000 + 20_000 + 8_192 + 4_000
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(found.values())
    assert isinstance(loaded.lm_head, CodesLinear)
    assert loaded.lm_head.table is loaded.transformer.wte
    assert loaded.get_input_embeddings() is loaded.transformer.wte
    assert torch.equal(loaded(ids()).logits, small(ids()).logits)
    assert torch.equal(generated(loaded), generated(small))
    loaded.tie_weights()  # nothing is left to tie
    assert loaded.lm_head.table is loaded.transformer.wte
    loaded.save_pretrained(folder / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again")
    assert torch.equal(again(ids()).logits, small(ids()).logits)


@torch.no_grad()
def test_with_and_without_the_head(small: Any, folder: Path, tmp_path: Path) -> None:
    base = transformers.GPT2Model.from_pretrained(folder)
    assert isinstance(base.wte, CompactEmbedding)
    right = small.transformer(ids()).last_hidden_state
    assert torch.equal(base(ids()).last_hidden_state, right)
    base.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert list(described["tables"]["tables"]) == list(described["tensors"]) == ["wte"]
    headed = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert headed.lm_head.table is headed.transformer.wte
    assert torch.equal(headed(ids()).logits, small(ids()).logits)


@pytest.mark.parametrize("order", ["fairseq_dpq, transformers", "transformers, fairseq_dpq"])
def test_a_program_that_only_loads(order: str, small: Any, folder: Path) -> None:
    """It imports both, in any order; a program without transformers does not import it."""
    code = (
        f"import torch, {order}\n"
        "torch.set_grad_enabled(False)\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"print(float(model(torch.tensor({ids().tolist()})).logits.double().sum()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        right = float(small(ids()).logits.double().sum())
    assert float(done.stdout) == pytest.approx(right, rel=1e-5)


def test_transformers_is_loaded_only_when_needed() -> None:
    """Not by this package alone; a program that has imported it may not have loaded its models."""
    code = (
        "import sys, fairseq_dpq, torch\n"
        "print('transformers' in sys.modules)\n"
        "import transformers\n"
        "model = torch.nn.Sequential(torch.nn.Embedding(50, 8))\n"
        "fairseq_dpq.compress(model, K=4, which='0')\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "print('fairseq_dpq' in AUTO_QUANTIZER_MAPPING)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\nTrue\n", done.stderr


def test_another_dtype(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert model.transformer.wte(ids()).dtype == torch.bfloat16
    assert model(ids()).logits.dtype == torch.bfloat16


def test_trained_then_compact(tmp_path: Path) -> None:
    model = gpt2()
    compress(model, min_rows=500, trainable=True)
    model.train()(ids(), labels=ids()).loss.backward()
    assert float(model.transformer.wte.query.grad.abs().sum()) > 0
    model.eval()
    before = model(ids()).logits
    compact(model)
    assert torch.allclose(model(ids()).logits, before, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)


@torch.no_grad()
def test_an_output_layer_with_a_shared_bias(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=700,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    model = transformers.BertForMaskedLM(config).eval()
    model.cls.predictions.bias.normal_()
    report = compress(model, min_rows=500)
    assert report.tables[0].tied == ("cls.predictions.decoder",)
    tokens = torch.arange(8).view(1, 8)
    right = model(tokens).logits
    model.save_pretrained(tmp_path / "hf")
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(loaded(tokens).logits, right)
    assert loaded.cls.predictions.decoder.bias is loaded.cls.predictions.bias
    save_compact(model, tmp_path / "own")
    own = load_compact(tmp_path / "own", transformers.BertForMaskedLM(config).eval())
    assert torch.equal(own(tokens).logits, right)


@torch.no_grad()
def test_a_table_of_encoder_decoder_and_output(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=700, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config).eval()
    tied = model.lm_head.weight is model.shared.weight
    report = compress(model, min_rows=500)
    assert model.encoder.embed_tokens is model.decoder.embed_tokens is model.shared
    assert bool(report.tables[0].tied) == tied
    tokens = torch.arange(2, 8).view(1, 6)
    right = model(input_ids=tokens, decoder_input_ids=tokens).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.encoder.embed_tokens is loaded.decoder.embed_tokens is loaded.shared
    assert torch.equal(loaded(input_ids=tokens, decoder_input_ids=tokens).logits, right)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["MBart", "Gemma3Text"])
def test_tables_with_a_scale(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if kind == "MBart":
        ends = ("layers", "attention_heads", "ffn_dim")
        sizes = {f"{side}_{end}": 2 for side in ("encoder", "decoder") for end in ends}
        config = transformers.MBartConfig(vocab_size=700, d_model=32, scale_embedding=True, **sizes)
        cls = transformers.MBartForConditionalGeneration
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
        sizes.update(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
        config = transformers.Gemma3TextConfig(vocab_size=700, **sizes)
        cls = transformers.Gemma3ForCausalLM
    model = cls(config).to(dtype).eval()
    report = compress(model, K=4, min_rows=500)
    assert len(report.tables) == 1 and report.tables[0].tied == ("lm_head",)
    dense = cls(config).to(dtype).eval()
    dense.load_state_dict(model.state_dict(), strict=False)
    dense.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight)
    tokens = torch.arange(3, 9).view(1, 6)
    right = model(input_ids=tokens).logits
    close = 1e-4 if dtype == torch.float32 else 0.05 * float(right.abs().max())
    assert torch.allclose(right, dense(input_ids=tokens).logits, atol=close)
    rows = model.get_input_embeddings()(tokens)
    assert torch.equal(rows, dense.get_input_embeddings()(tokens)) and rows.dtype == dtype
    assert not torch.equal(rows, model.get_input_embeddings().weight[tokens])
    model.save_pretrained(tmp_path / "hf")
    save_compact(model, tmp_path / "own")
    for loaded in (
        cls.from_pretrained(tmp_path / "hf", dtype=dtype),
        load_compact(tmp_path / "own", cls(config).eval()),
    ):
        assert torch.equal(loaded.get_input_embeddings()(tokens), rows)
        # Buffers that are not saved, such as those of rotary positions, are float32 in a new model.
        exact = 0.0 if dtype == torch.float32 else close
        assert torch.allclose(loaded(input_ids=tokens).logits, right, rtol=0, atol=exact)


class Encoder(torch.nn.Module):
    """A module that contains a Hugging Face model and saves it by that model's own function, as
    sentence-transformers does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.ModuleDict({"model": model})])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.parts[0]["model"](tokens).last_hidden_state.mean(1)

    def save(self, folder: Path) -> None:
        self.parts[0]["model"].save_pretrained(folder)


@torch.no_grad()
@pytest.mark.parametrize("trainable", [False, True])
def test_models_inside_another_module(trainable: bool, tmp_path: Path) -> None:
    model = Encoder(gpt2().transformer)
    report = compress(model, min_rows=500, trainable=trainable)
    assert report.tables[0].path == "parts.0.model.wte"
    model.save(tmp_path)
    loaded = Encoder(transformers.AutoModel.from_pretrained(tmp_path))
    assert torch.equal(loaded(ids()), model(ids()))
    if trainable:
        compact(model)
        model.save(tmp_path / "small")
        loaded = Encoder(transformers.AutoModel.from_pretrained(tmp_path / "small"))
        assert isinstance(loaded.parts[0]["model"].wte, CompactEmbedding)
        assert torch.equal(loaded(ids()), model(ids()))


@torch.no_grad()
def test_a_sentence_transformer(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *map(str, range(600))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    sizes = {"vocab_size": 602, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(num_attention_heads=2, **sizes))
    bert.save_pretrained(tmp_path / "full")
    fast.save_pretrained(tmp_path / "full")
    model = library.SentenceTransformer(str(tmp_path / "full"), device="cpu")
    texts = ["1 2 3", "500 501", "7"]
    full = model.encode(texts)
    compress(model, min_rows=500)
    right = model.encode(texts)
    assert not (right == full).all()
    model.save(str(tmp_path / "small"))
    loaded = library.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert (loaded.encode(texts) == right).all()


@torch.no_grad()
def test_a_model_saved_without_its_head_after_it(small: Any, tmp_path: Path) -> None:
    """Both have one config object: each save describes the model that is saved."""
    model = copy.deepcopy(small)
    model.transformer.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "headed")
    base = transformers.GPT2Model.from_pretrained(tmp_path / "base")
    headed = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "headed")
    assert torch.equal(headed(ids()).logits, small(ids()).logits)
    right = small.transformer(ids()).last_hidden_state
    assert torch.equal(base(ids()).last_hidden_state, right)
    described = json.loads((tmp_path / "base" / "config.json").read_text())["quantization_config"]
    assert list(described["tensors"]) == ["wte"]


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", [{}, {"method": "sx"}, {"method": "low_rank", "rank": 8}])
def test_the_training_form_is_kept(settings: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    model = gpt2(tied)
    compress(model, which="transformer.wte", trainable=True, **settings)
    model.train()(ids())  # moves statistics
    model.eval().save_pretrained(tmp_path)
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(found.values())
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in loaded.named_parameters()} == trained
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {p.dtype for p in half.parameters()}, {b.dtype for b in half.transformer.wte.buffers()}
    assert kinds[0] == {torch.bfloat16} and kinds[1] <= {torch.float32}


@torch.no_grad()
def test_tiers_keep_their_16_bits(tmp_path: Path) -> None:
    """Whatever the dtype of the model: bfloat16 would round their values."""
    model = gpt2()
    compress(model, which="transformer.wte", calibrate=[ids()])
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        mine, theirs = model.transformer.wte, loaded.transformer.wte
        for tier, other in zip(mine.tiers, theirs.tiers):
            assert torch.equal(tier.values, other.values)
        assert torch.equal(mine.correction, theirs.correction)
        assert theirs(ids()).dtype == dtype
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)


def _damage(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def test_damaged_files_are_refused(small: Any, tmp_path: Path) -> None:
    def load() -> None:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    small.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + header["transformer.wte.codes"]["data_offsets"][0] + 5] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"transformer\.wte: codes does not match"):
        load()
    small.save_pretrained(tmp_path)
    _damage(tmp_path, lambda q: q["tables"]["tables"]["transformer.wte"].update(num_embeddings=9))
    with pytest.raises(ValueError, match="does not match its checksum"):
        load()
    small.save_pretrained(tmp_path)
    _damage(tmp_path, lambda q: q["tensors"].update({"transformer.wte": ["codes"]}))
    with pytest.raises(ValueError, match=r"transformer\.wte: values"):
        load()


def _drop(name: str) -> Any:
    return lambda q: q.pop(name)


@pytest.mark.parametrize(
    "change,why",
    [
        (_drop("tables"), "'version' is missing"),
        (_drop("tensors"), "expected the names of those of transformer.wte, found None"),
        (lambda q: q.update(tables=[1]), "expected dict"),
        (lambda q: q.update(tensors=["transformer.wte"]), "expected the names"),
        (lambda q: q.update(tensors={"transformer.wte": 7}), "expected the names .* found 7"),
        (lambda q: q.update(tensors={"transformer.wte": ["a..b"]}), r"found \['a\.\.b'\]"),
        (lambda q: q.update(bits=4), "unknown entry bits"),
        (lambda q: q["tables"].update(version="x"), "version: expected int"),
    ],
)
@pytest.mark.parametrize("trainable", [False, True])
def test_a_damaged_config_is_one_line(
    change: Any, why: str, trainable: bool, tmp_path: Path
) -> None:
    model = gpt2()
    compress(model, min_rows=500, K=4, trainable=trainable)
    model.save_pretrained(tmp_path)
    _damage(tmp_path, change)
    with pytest.raises(ValueError, match=why) as caught:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value) and "quantization_config" in str(caught.value)


def test_compression_is_not_done_while_loading(tmp_path: Path) -> None:
    from fairseq_dpq.any_model.huggingface import CompactConfig

    gpt2().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pre-quantized"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=CompactConfig()
        )
