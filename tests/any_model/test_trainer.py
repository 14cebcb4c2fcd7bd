"""Training with transformers' own Trainer: checkpoints, resuming, the example of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_dpq import DPQEmbedding, compact, compress

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

_PAGE = Path(__file__).parents[2] / "docs" / "any-model.md"
ROWS = 300


@pytest.fixture(autouse=True)
def _our_datasets_are_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes tests/datasets for the library of that name."""
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)


def gpt2(tied: bool = True) -> Any:
    """300 x 32, one layer, with dropout."""
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": tied}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=ROWS, **sizes, **ends))


def compressed(tied: bool, **settings: Any) -> Any:
    model = gpt2(tied)
    compress(model, K=8, D=8, which="transformer.wte", trainable=True, **settings)
    return model


def data() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(2, ROWS, (16, 9), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def page_trainer() -> Any:
    """The class of the page, as it is there."""
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class DPQTrainer" in block), names)
    return names["DPQTrainer"]


def trainer(model: Any, out: Path, steps: int = 6) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return page_trainer()(model=model, args=args, train_dataset=data())


def equal(left: Any, right: Any) -> bool:
    mine, theirs = left.state_dict(), right.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["vq", "sx"])
def test_resumed_training_ends_where_the_whole_one_does(
    tied: bool, method: str, tmp_path: Path
) -> None:
    whole = compressed(tied, method=method)
    start = {key: tensor.clone() for key, tensor in whole.state_dict().items()}
    trainer(whole, tmp_path / "whole").train()
    assert not torch.equal(whole.transformer.wte.query, start["transformer.wte.query"])
    middle = tmp_path / "whole" / "checkpoint-3"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(middle)
    assert isinstance(loaded.transformer.wte, DPQEmbedding)
    if tied:
        assert loaded.lm_head.table is loaded.transformer.wte
    assert not equal(loaded, whole)
    for name, model in (("loaded", loaded), ("fresh", compressed(tied, method=method))):
        trainer(model, tmp_path / name).train(resume_from_checkpoint=str(middle))
        assert equal(model, whole), name
    last = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert equal(last, whole)
    ids = data()[0]["input_ids"][None]
    compact(whole.eval())
    compact(last.eval())
    assert torch.equal(last(ids).logits, whole(ids).logits)


def test_a_compact_table_beside_trained_weights(tmp_path: Path) -> None:
    whole = gpt2()
    compress(whole, K=8, which="transformer.wte")
    codes = whole.transformer.wte.codes.clone()
    trainer(whole, tmp_path / "whole").train()
    middle = tmp_path / "whole" / "checkpoint-3"
    model = transformers.AutoModelForCausalLM.from_pretrained(middle)
    assert not torch.equal(model.transformer.wpe.weight, whole.transformer.wpe.weight)
    trainer(model, tmp_path / "again").train(resume_from_checkpoint=str(middle))
    assert equal(model, whole) and torch.equal(codes, model.transformer.wte.codes)


def test_the_example_adds_the_regularizer(tmp_path: Path) -> None:
    """It draws queries to their centroids; without it they stay further away, with a warning."""
    far = []
    for cls in (page_trainer(), transformers.Trainer):
        model = compressed(False, method="vq", commitment=50.0)
        args = trainer(model, tmp_path).args
        cls(model=model, args=args, train_dataset=data()).train()
        table = model.transformer.wte
        far.append(float((table.query - table.eval().weight).pow(2).sum()))
        if cls is transformers.Trainer:
            with pytest.warns(UserWarning, match=r"collect_regularizer\(model\) to the loss"):
                compact(model)
    assert far[0] < 0.9 * far[1]
