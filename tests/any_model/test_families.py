"""Model families of Hugging Face, small and random: outputs and generated text are the same bit for
bit once a compressed model is saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_dpq import compress, load_compact, save_compact

transformers = pytest.importorskip("transformers")

ROWS = 300
_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
_SEQ2SEQ = {
    "d_model": 32,
    "max_position_embeddings": 40,
    "decoder_start_token_id": 2,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# class, config, settings of the config, output layers that are tied to the table
FAMILIES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 1, "n_head": 2}, 1),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}, 1),
    "xlm-r": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", _BERT, 1),
    "marian": ("MarianMTModel", "MarianConfig", {**_SEQ2SEQ, "decoder_vocab_size": ROWS}, 1),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", _SEQ2SEQ, 1),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _LLAMA, 1),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _LLAMA, 1),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}, 1),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": False}, 0),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 40},
        1,
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ, 1),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_BERT, "embedding_size": 32}, 1),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 16}, 1),
    "deberta-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", _BERT, 1),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_BERT, "ffn_dim": 32, "word_embed_proj_dim": 32},
        1,
    ),
    "clip text": (
        "CLIPTextModelWithProjection",
        "CLIPTextConfig",
        {**_BERT, "projection_dim": 8},
        0,
    ),
}


HOW: dict[str, dict[str, Any]] = {
    "compact": {"K": 4},
    "training": {"K": 4, "trainable": True},
    "tiers": {"target_ratio": 4},
}


def outputs(model: Any) -> list[torch.Tensor]:
    """Of one batch with padding, and what the model generates if it can."""
    tokens = torch.randint(3, ROWS, (2, 7), generator=torch.Generator().manual_seed(1))
    tokens[1, -1] = 2
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    out = [value for value in model(**inputs, **extra).values() if torch.is_tensor(value)]
    if model.can_generate():
        out.append(model.generate(**inputs, max_new_tokens=5, do_sample=False, num_beams=2))
    return out


@torch.no_grad()
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded(family: str, how: str, tmp_path: Path) -> None:
    name, config_name, settings, tied = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(vocab_size=ROWS, **{**_ENDS, **settings})
    model = cls(config).eval()
    computed = model._keys_to_ignore_on_save or ()  # Marian's positions are not saved
    for key, parameter in model.named_parameters():  # biases too: each is seen to be kept
        if key not in computed:
            parameter.add_(0.05 * torch.randn_like(parameter))
    full = outputs(model)
    report = compress(model, min_rows=ROWS, **HOW[how])
    assert sum(len(table.tied) for table in report.tables) == tied
    right = outputs(model)
    assert not torch.equal(right[0], full[0])
    model.save_pretrained(tmp_path / "hf")
    loaded, found = cls.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(found.values())
    copies = [loaded.eval()]
    if how != "training":
        save_compact(model, tmp_path / "own")
        copies.append(load_compact(tmp_path / "own", cls(config).eval()))
    for other in copies:
        mine = outputs(other)
        assert len(mine) == len(right) and all(map(torch.equal, mine, right))
