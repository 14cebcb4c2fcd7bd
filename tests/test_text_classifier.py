"""The text classifier against the paper's equations worked with NumPy, its pooling and empty
documents, and batch norm whose running statistics do not depend on micro-batches."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.tasks.text_classifier import (
    HEAD,
    BatchNorm,
    TextClassifier,
    TextClassifierConfig,
    step_all,
)


def build(pooling: str = "mean") -> TextClassifier:
    torch.manual_seed(0)
    dictionary = Dictionary()
    for word in "abcdefgh":
        dictionary.add_symbol(word)
    task = SimpleNamespace(source_dictionary=dictionary, classes=["x", "y", "z"])
    cfg = TextClassifierConfig(pooling=pooling, encoder_embed_dim=6, hidden_size=5)
    return TextClassifier.build_model(cfg, task)


PAD = 1
TOKENS = torch.tensor([[4, 5, 6, 4], [7, PAD, PAD, PAD], [8, 9, PAD, PAD], [11, 10, 5, PAD]])


def normalized(x: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    return (x - mean) / np.sqrt(var + 1e-3)


def by_hand(model: TextClassifier, pooled: np.ndarray, training: bool) -> np.ndarray:
    """Batch norm, ReLU, dense, batch norm, ReLU, dense."""
    p = {k: v.detach().numpy() for k, v in model.classification_heads[HEAD].state_dict().items()}
    x = pooled
    for norm, dense in (("norm1", "dense1"), ("norm2", "dense2")):
        mean, var = p[f"{norm}.running_mean"], p[f"{norm}.running_var"]
        if training:
            mean, var = x.mean(0), x.var(0)
        x = np.maximum(normalized(x, mean, var), 0)
        x = x @ p[f"{dense}.weight"].T + p[f"{dense}.bias"]
    return x


def words_of(row: torch.Tensor) -> list[int]:
    return [int(t) for t in row if int(t) != PAD]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "mean_max"])
def test_logits_are_those_of_the_equations(pooling: str, training: bool) -> None:
    model = build(pooling).train(training)
    table = model.encoder.embed_tokens.weight.detach().numpy()
    rows = [table[words_of(row)] for row in TOKENS]
    pooled = np.stack([r.mean(0) for r in rows])
    if pooling == "mean_max":
        pooled = np.concatenate([pooled, np.stack([r.max(0) for r in rows])], axis=1)
    logits, _ = model(TOKENS, features_only=True, classification_head_name=HEAD)
    np.testing.assert_allclose(
        logits.detach().numpy(), by_hand(model, pooled, training), rtol=1e-4, atol=1e-5
    )
    probabilities = model.get_normalized_probs((logits, {}), log_probs=False)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(4))


@pytest.mark.parametrize("pooling", ["mean", "mean_max"])
def test_empty_documents_are_the_zero_vector(pooling: str) -> None:
    model = build(pooling).eval()
    tokens = torch.cat([TOKENS, torch.full((1, 4), PAD)])
    pooled = model.encoder(tokens)
    assert pooled.isfinite().all() and pooled[-1].eq(0).all() and pooled[:-1].any(1).all()
    only = torch.full((3, 1), PAD)
    loss = model.train()(only)[0].sum()
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


def test_padding_changes_nothing() -> None:
    model = build("mean_max").eval()
    wide = torch.cat([TOKENS, torch.full((4, 5), PAD)], dim=1)
    torch.testing.assert_close(model(TOKENS)[0], model(wide)[0], rtol=0, atol=0)
    loss = model.train()(wide)[0][:, 0].sum()
    loss.backward()
    assert model.encoder.embed_tokens.weight.grad[PAD].eq(0).all()


def test_a_task_without_labels() -> None:
    task = SimpleNamespace(source_dictionary=Dictionary())
    with pytest.raises(DPQConfigError, match="use it with --task text_classification"):
        TextClassifier.build_model(TextClassifierConfig(), task)  # type: ignore[arg-type]


# ---- batch norm ----


def test_batch_norm_is_torchs_in_training() -> None:
    torch.manual_seed(1)
    x = torch.randn(8, 4, requires_grad=True)
    ours, theirs = BatchNorm(4), torch.nn.BatchNorm1d(4, eps=1e-3)
    weights = torch.randn(8, 4)
    grads = []
    for norm in (ours, theirs):
        out = norm(x)
        grads.append(torch.autograd.grad((out * weights).sum(), x)[0])
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(*grads)


def test_running_statistics_are_those_of_all_micro_batches() -> None:
    torch.manual_seed(2)
    data = torch.randn(12, 4, dtype=torch.float64) * 3 + 1
    whole, parts = BatchNorm(4), BatchNorm(4)
    whole(data)
    for part in data.split([5, 5, 2]):
        parts(part)
    for norm in (whole, parts):
        step_all(norm)
        # The first update leaves no trace of 0 and 1.
        torch.testing.assert_close(norm.running_mean, data.mean(0).float())
        torch.testing.assert_close(norm.running_var, data.var(0, unbiased=False).float())
    other = data * 2
    parts(other)
    parts.step()
    average = (data.mean(0) + other.mean(0)).float() / 2  # a plain average at first
    torch.testing.assert_close(parts.running_mean, average)
    parts.updates.fill_(1000)
    parts(data)
    parts.step()
    torch.testing.assert_close(parts.running_mean, average * 0.99 + data.mean(0).float() * 0.01)


def test_step_without_a_batch_changes_nothing() -> None:
    norm = BatchNorm(3)
    before = copy.deepcopy(norm.state_dict())
    norm.step()
    norm.eval()(torch.randn(4, 3))
    norm.step()
    for name, tensor in norm.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_one_document_is_a_batch() -> None:
    norm = BatchNorm(3)
    assert norm(torch.randn(1, 3)).eq(0).all()


def test_running_statistics_stay_float32() -> None:
    norm = BatchNorm(3).half()
    assert norm.weight.dtype == torch.float16 and norm.running_var.dtype == torch.float32
    assert norm(torch.randn(4, 3).half()).dtype == torch.float16
