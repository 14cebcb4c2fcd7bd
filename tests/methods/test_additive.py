"""kd_codes and fixed_codes: rows, gradients, statistics and starts, worked out here with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fairseq_dpq import DPQConfigError, DPQEmbedding, collect_regularizer
from fairseq_dpq.forms.additive_codes import AdditiveEmbedding
from fairseq_dpq.methods.additive import SoftmaxSum

PAD, N, DIM, K, D, WIDTH = 1, 40, 6, 5, 3, 4
EPS = 1e-3
METHODS = [
    {"method": "kd_codes"},
    {"method": "kd_codes", "code_width": WIDTH},
    {"method": "fixed_codes", "code_width": WIDTH},
    {"method": "fixed_codes", "code_width": 9},
]
ALL = pytest.mark.parametrize("options", METHODS, ids=lambda o: "-".join(map(str, o.values())))


def make(**options) -> DPQEmbedding:
    torch.manual_seed(0)
    return DPQEmbedding(N, DIM, PAD, K=K, D=D, option_files=False, **options)


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def batch_norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / np.sqrt(x.var(0) + EPS)


def numpy_rows(layer: DPQEmbedding, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and rows of one batch in training, by its own statistics."""
    query = array(layer.query)[ids.numpy()]
    if layer.method.name == "kd_codes":
        logits = batch_norm(query.reshape(-1, K))
        logits = logits * array(layer.logit_scale) + array(layer.logit_shift)
        codes = logits.reshape(-1, D, K).argmax(-1)
    else:
        codes = query.astype(int)
    values = array(layer.values)
    x = np.mean([values[j, codes[:, j]] for j in range(D)], axis=0)
    if "matrix" in layer._parameters:
        x = batch_norm(x) @ array(layer.matrix)
    return codes, batch_norm(x) * array(layer.outer_scale) + array(layer.outer_shift)


def train_a_little(layer: DPQEmbedding, updates: int = 30) -> torch.Tensor:
    target = torch.randn(N, DIM)
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.03)
    for _ in range(updates):
        ids = torch.randint(N, (32,))
        loss = (layer(ids) - target[ids]).pow(2).mean() + collect_regularizer(layer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return target


@ALL
def test_rows_in_training_by_numpy(options: dict) -> None:
    layer = make(**options)
    torch.nn.init.normal_(layer.outer_shift)
    ids = torch.tensor([2, 7, 7, 30, 0, 39])
    codes, wanted = numpy_rows(layer, ids)
    np.testing.assert_allclose(array(layer(ids)), wanted, atol=1e-5)
    assert not layer(torch.tensor([PAD, 3]))[0].any()
    if options["method"] == "fixed_codes":
        assert (codes == layer.codes().numpy()[ids.numpy()]).all()


@ALL
def test_running_statistics_are_those_of_the_first_batch(options: dict) -> None:
    layer = make(**options)
    ids = torch.arange(2, 30)
    _, wanted = numpy_rows(layer, ids)
    layer(ids)  # the first batch sets them, as ResponseStatistics does
    np.testing.assert_allclose(array(layer.eval()(ids)), wanted, atol=1e-4)
    assert float(layer.outer_updates) == 1


@ALL
def test_compact_gives_the_same_bits_and_has_the_size_of_the_formula(options: dict) -> None:
    layer = make(**options)
    train_a_little(layer)
    layer.eval()
    form = layer.compact(packed=True)
    assert isinstance(form, AdditiveEmbedding)
    ids = torch.arange(N)
    with torch.no_grad():
        assert torch.equal(form(ids), layer(ids)) and torch.equal(form.dense(), layer.weight)
        for i in (0, 7, 39):  # whatever else is in the batch
            assert torch.equal(layer(ids[i : i + 1]), layer(ids)[i : i + 1])
    width = options.get("code_width", DIM)
    numbers = D * K * width + DIM + (width * DIM if width != DIM else 0)
    assert layer.compression_ratio() == 32 * N * DIM / form.formula_bits()
    assert form.formula_bits() == N * D * 3 + 32 * numbers
    assert form.saved_nbytes == N * 2 + 4 * numbers


@ALL
def test_tied_table_has_the_rows_and_a_gradient(options: dict) -> None:
    layer = make(**options)
    train_a_little(layer)
    layer.zero_grad()
    with torch.no_grad():
        table = layer.weight
    torch.testing.assert_close(layer.weight.detach(), table, rtol=0, atol=1e-6)
    layer.weight.pow(2).sum().backward()
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_gradients_of_the_sum_by_hand() -> None:
    """dL/dV counts the codes; dL/dresponse is that of the soft mixture."""
    torch.manual_seed(2)
    response, values = torch.randn(4, D, K), torch.randn(D, K, WIDTH)
    codes, grad = response.argmax(-1), torch.randn(4, WIDTH)
    r, v = (t.clone().requires_grad_() for t in (response, values))
    SoftmaxSum.apply(r, v, codes).backward(grad)
    soft = response.clone().requires_grad_()
    torch.einsum("tjk,jkw->tw", torch.softmax(soft, -1), values).backward(grad)
    torch.testing.assert_close(r.grad, soft.grad)
    wanted = torch.zeros_like(values)
    for token in range(4):
        for j in range(D):
            wanted[j, codes[token, j]] += grad[token]
    torch.testing.assert_close(v.grad, wanted)


@ALL
def test_single_tokens_take_the_running_statistics(options: dict) -> None:
    layer = make(**options)
    train_a_little(layer)
    one = torch.tensor([5])
    expected = layer.eval()(one).detach()
    before = layer.outer_mean.clone()
    torch.testing.assert_close(layer.train()(one).detach(), expected, rtol=0, atol=1e-5)
    assert layer(one[:0]).shape == (0, DIM) and torch.equal(layer.outer_mean, before)


def test_fixed_codes_stay_and_logits_move() -> None:
    fixed, free = make(**METHODS[2]), make(**METHODS[1])
    before = [layer.query.detach().clone() for layer in (fixed, free)]
    for layer in (fixed, free):
        train_a_little(layer)
    assert torch.equal(fixed.query, before[0]) and not fixed.query.requires_grad
    assert (free.query != before[1]).float().mean() > 0.9
    assert int(fixed.query.min()) >= 0 and int(fixed.query.max()) == K - 1


def test_distillation_adds_the_mean_squared_distance() -> None:
    layer = make(method="kd_codes", distill_from="full.pt", distill_weight=3.0)
    assert not layer.guide.requires_grad and not layer.guide.any()
    layer.guide.data.normal_()
    ids = torch.tensor([4, PAD, 9, 9])
    rows = layer(ids)
    wanted = 3 * (rows - layer.guide[ids])[[0, 2, 3]].pow(2).mean()
    torch.testing.assert_close(collect_regularizer(layer), wanted)
    assert collect_regularizer(make(method="kd_codes")) == 0


@ALL
def test_start_from_a_table(options: dict) -> None:
    """Rows of the vocabulary are those of the best vectors for the codes; no map of at least the
    table's width loses anything."""
    torch.manual_seed(1)
    table = torch.randn(N, DIM) + 2
    layer = DPQEmbedding.from_pretrained(table, PAD, K=K, D=D, option_files=False, **options).eval()
    codes = layer.codes().long()
    used = torch.zeros(N, D * K).scatter_(1, codes + torch.arange(D) * K, 1)
    used, real = used[2:].numpy(), table[2:].numpy()
    best = used @ np.linalg.lstsq(used, real, rcond=None)[0]
    rows = array(layer(torch.arange(2, N)))
    error, least = ((x - real) ** 2 for x in (rows, best))
    if options.get("code_width", DIM) >= DIM:
        assert error.sum() == pytest.approx(least.sum(), rel=0.08)
    assert least.sum() - 1e-3 <= error.sum() < 0.9 * ((real - real.mean(0)) ** 2).sum()


def test_options() -> None:
    assert make(method="kd_codes", code_width=DIM).compression_ratio() == pytest.approx(
        make(method="kd_codes").compression_ratio()
    )
    with pytest.raises(DPQConfigError, match="codes='a' has no effect with method='kd_codes'"):
        make(method="kd_codes", codes="a")
    with pytest.raises(DPQConfigError, match="code_width=-1: must not be negative"):
        make(method="kd_codes", code_width=-1)
    with pytest.raises(DPQConfigError, match="distill_weight=-1: must not be negative"):
        make(method="kd_codes", distill_weight=-1)
    with pytest.raises(DPQConfigError, match="K=257: stored codes are below 256"):
        DPQEmbedding(N, DIM, method="fixed_codes", K=257, D=2)
    # D need not divide the embedding size: the groups do not share its columns.
    assert DPQEmbedding(N, 7, method="kd_codes", K=4, D=3)(torch.arange(9)).shape == (9, 7)
