"""add_rows: the old rows stay, the new ones come near what was given, outputs and files follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fairseq_dpq import add_rows, compress, load_compact, save_compact
from helpers.any_model import PAD, ROWS, SIZE, rows_of_few_parts, some_ids, toy

SETTINGS: list[tuple[dict[str, Any], float]] = [
    ({"K": 8}, 1e-9),  # the rows have 8 values in each pair of numbers
    ({"K": 8, "D": 8, "share_subspaces": True}, 0.5),
    ({"method": "scalar", "bits": 8}, 1e-4),
]


@torch.no_grad()
@pytest.mark.parametrize("settings,error", SETTINGS)
def test_rows_that_are_given(settings: dict[str, Any], error: float, tmp_path: Path) -> None:
    model = toy()
    compress(model, min_rows=100, **settings)
    ids, h = some_ids(), torch.randn(4, SIZE)
    before, logits = model(ids), model.output(h)
    new = rows_of_few_parts(ROWS, 1)[5:12]  # among those that the codes were made for
    assert add_rows(model, new, "token") == ROWS + 7
    assert torch.equal(model(ids)[..., :ROWS], before)
    assert model.token.num_embeddings == ROWS + 7 and model.output.table is model.token
    rows = model.token(torch.arange(ROWS, ROWS + 7))
    assert float((rows - new).pow(2).sum() / new.pow(2).sum()) < error
    grown = model.output(h)
    assert torch.equal(grown[:, :ROWS], logits)
    assert torch.allclose(grown[:, ROWS:], h @ rows.t(), atol=1e-4)
    assert not bool(model.token(torch.tensor([PAD])).any())
    save_compact(model, tmp_path)
    fresh = toy()
    fresh.token = nn.Embedding(ROWS + 7, SIZE, padding_idx=PAD)
    fresh.output = nn.Linear(SIZE, ROWS + 7)
    fresh.output.weight = fresh.token.weight
    assert torch.equal(load_compact(tmp_path, fresh)(ids), model(ids))


@torch.no_grad()
def test_a_number_of_rows_takes_the_mean() -> None:
    model = nn.Sequential(nn.Embedding(200, 8))
    model[0].weight.add_(3)
    compress(model, K=16, D=8, which="0")
    mean = model[0].dense().mean(0)
    add_rows(model, 2)
    assert torch.allclose(model[0](torch.tensor([200, 201])), mean.expand(2, 8), atol=0.2)


def test_what_is_refused() -> None:
    model = toy()
    with pytest.raises(ValueError, match="no compressed table; resize its full table instead"):
        add_rows(model, 3)
    compress(model, K=4, min_rows=100)
    for arguments, why in (
        ((3,), "several compressed tables: give which, one of token, first, second, same"),
        ((3, "position"), "which='position': the model has token, first"),
        ((0, "token"), "rows=0: give 1 or more"),
        ((torch.zeros(2, 5), "token"), r"rows has shape \(2, 5\); give \(number, 16\)"),
        ((torch.full((1, SIZE), float("nan")), "token"), "NaN or infinite"),
    ):
        with pytest.raises(ValueError, match=why):
            add_rows(model, *arguments)  # type: ignore[arg-type]
    low = toy()
    compress(low, method="low_rank", rank=4, which="token")
    with pytest.raises(ValueError, match="a low_rank table takes no new rows; add them to the"):
        add_rows(low, 3)
    assert low.token.num_embeddings == ROWS


FAMILIES = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "LlamaForCausalLM": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "BertForMaskedLM": {},
    "BartForConditionalGeneration": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    "Gemma3ForCausalLM": {"num_key_value_heads": 1, "head_dim": 16},
}


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_hugging_face_models(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes.update(vocab_size=300, num_attention_heads=2, **FAMILIES[name])
    torch.manual_seed(0)
    model = cls(cls.config_class(pad_token_id=0, **sizes)).eval()
    compress(model, K=8, which=lambda path, module: module.num_embeddings == 300)
    tokens = torch.arange(3, 9).view(1, 6)
    before = model(input_ids=tokens).logits
    for wanted in (300, None):  # as programs do that call it always
        assert model.resize_token_embeddings(wanted) is model.get_input_embeddings()
    with pytest.raises(ValueError, match=r"is compressed: call fairseq_dpq.add_rows\(model, 4\), "):
        model.resize_token_embeddings(301, pad_to_multiple_of=16)
    with pytest.raises(ValueError, match="compressed: resize the full model to 299 rows, then"):
        model.resize_token_embeddings(299)
    assert add_rows(model, 4) == 304 == model.config.vocab_size
    after = model(input_ids=tokens).logits
    assert after.shape[-1] == 304 and torch.allclose(after[..., :300], before, atol=1e-5)
    tokens[0, 2] = 303
    right = model(input_ids=tokens).logits
    model.save_pretrained(tmp_path)
    loaded, found = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert torch.equal(loaded(input_ids=tokens).logits, right)
