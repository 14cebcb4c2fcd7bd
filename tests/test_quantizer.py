"""The paper's equations: forward value, codes, gradients and regulariser of SX and VQ, by hand and
against NumPy; codes that do not depend on how a batch is cut; the full-rank proposition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fairseq_dpq import CompactEmbedding, DPQEmbedding, collect_regularizer, native
from fairseq_dpq.methods.sx import softmax_gradients
from fairseq_dpq.training import codes as codes_module
from fairseq_dpq.training.distances import DISTANCES, Stats, batch_statistics
from helpers import numpy_dpq as ref
from helpers.layers import large_start


def evaluation_codes(q: torch.Tensor, keys: torch.Tensor, distance: str, stats: Stats | None):
    """The function under test, with the distance by name."""
    return codes_module.evaluation_codes(q, keys, DISTANCES[distance], stats)


CASES = [
    pytest.param(method, schedule, extra, id="-".join([method, schedule, *extra]))
    for method, schedule, extra in (
        ("sx", "paper", {}),
        ("sx", "paper", {"tau": 0.3}),
        ("sx", "warmup", {"tau": 0.3}),
        ("vq", "paper", {"regularizer_weight": 0.7}),
        ("vq", "paper", {"regularizer_weight": 0.7, "commitment": 0.25}),
        ("vq", "paper", {"regularizer_weight": 0.7, "value_gradient": 0.3}),
        ("vq", "warmup", {"commitment": 0.25}),
    )
]


def set_parameters(layer: DPQEmbedding, **tensors: list) -> None:
    with torch.no_grad():
        for name, numbers in tensors.items():
            parameter = getattr(layer, name)
            parameter.copy_(torch.tensor(numbers).view_as(parameter))


def test_sx_by_hand() -> None:
    layer = DPQEmbedding(1, 1, K=2, D=1, schedule="paper")
    set_parameters(layer, query=[1.0], keys=[0.0, math.log(3)], values=[2.0, 6.0])
    layer.norm_var.fill_(1 - 1e-3)  # one token has no spread: the running statistics serve
    out = layer(torch.tensor([0]))
    assert out.item() == 6.0  # code 1: <q, k> = ln 3 > 0
    out.sum().backward()
    # p = (1/4, 3/4), dL/dw = V = (2, 6), mean under p 5: dL/dresponse = (-3/4, 3/4)
    assert layer.values.grad.flatten().tolist() == [0.0, 1.0]  # w is one-hot for the values
    torch.testing.assert_close(layer.keys.grad.flatten(), torch.tensor([-0.75, 0.75]))
    torch.testing.assert_close(layer.query.grad.item(), 0.75 * math.log(3), rtol=1e-6, atol=0)
    assert layer.regularizers.pop() is None


def test_sx_by_the_nearest_key_by_hand() -> None:
    """Keys -1 and 1 have a mean squared distance of 1 from their middle: tau is in that unit."""
    layer = DPQEmbedding(1, 1, K=2, D=1, schedule="warmup", tau=2.0)
    set_parameters(layer, query=[math.log(3) / 2], keys=[-1.0, 1.0], values=[2.0, 6.0])
    out = layer(torch.tensor([0]))
    assert out.item() == 6.0
    out.sum().backward()
    # responses -(q - k)^2 / 2 differ by 4 q / 2 = ln 3: p = (1/4, 3/4) as above
    assert layer.values.grad.flatten().tolist() == [0.0, 1.0]
    assert layer.keys.grad is None  # they follow the queries
    # d response / dq = -(q - k): 0.75 * (2 / 2)
    torch.testing.assert_close(layer.query.grad.item(), 0.75 * 2, rtol=1e-5, atol=0)


def test_vq_by_hand() -> None:
    layer = DPQEmbedding(2, 1, K=2, D=1, method="vq", schedule="paper", regularizer_weight=0.5)
    set_parameters(layer, query=[1.0, 5.0], values=[0.0, 4.0])
    out = layer(torch.tensor([0, 1]))
    # responses (-1, -9) and (-25, -1): normalised over the batch they are (1, -1) and (-1, 1)
    assert out.flatten().tolist() == [0.0, 4.0]
    (out * torch.tensor([[7.0], [11.0]])).sum().backward()
    assert layer.query.grad.flatten().tolist() == [7.0, 11.0]  # straight through
    assert layer.values.grad is None  # nothing but the regulariser moves a centroid
    regularizer = collect_regularizer(layer)
    assert regularizer is not None and regularizer.item() == 0.5 * (1 + 1) / 2
    regularizer.backward()
    assert layer.values.grad.flatten().tolist() == [0.5 * 2 * -1 / 2, 0.5 * 2 * -1 / 2]
    assert layer.query.grad.flatten().tolist() == [7.0, 11.0]  # the query is stopped there


@pytest.mark.parametrize("library", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method,schedule,extra", CASES)
def test_step_equals_numpy(
    method: str,
    schedule: str,
    shared: bool,
    extra: dict,
    library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward, through the statistics of the batch too, in both implementations."""
    if not library:
        monkeypatch.setattr(native, "softmax_gradients", lambda *parts: None)
    n, d, K, D, pad = 9, 12, 7, 4, 2
    torch.manual_seed(sum(map(ord, f"{schedule}{shared}{extra}")))
    how = {"K": K, "D": D, "method": method, "schedule": schedule, "share_subspaces": shared}
    layer = DPQEmbedding(n, d, pad, **how, **extra)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        layer.query[pad] = 100.0  # would spoil the statistics if padding were counted
    layer.defer_updates = True
    tokens = torch.tensor([[3, 1, 2, 8], [5, 3, 2, 0], [7, 6, 3, 2]])  # 3 repeats, 4 is absent
    up = torch.randn(3, 4, d)

    def numpy(t: torch.Tensor) -> np.ndarray:
        return t.detach().double().numpy()

    keys = layer.codebook().keys
    paper = schedule == "paper"
    given: dict = {"regularizer_weight": 0.0, **extra}
    if method == "sx" and not paper:  # a temperature for each group
        middle = numpy(keys) - numpy(keys).mean(1, keepdims=True)
        spread = (middle**2).sum(-1).mean(1)
        given["tau"] = extra["tau"] * np.broadcast_to(spread, (D,))[:, None]
    expected = ref.train_step(
        tokens.numpy().ravel(),
        numpy(layer.query).reshape(n, D, -1),
        numpy(keys),
        numpy(layer.values),
        numpy(up).reshape(-1, d),
        method=method,
        distance="dot" if paper and (method == "sx" or "value_gradient" in extra) else "euclidean",
        normalize=paper,
        padding_idx=pad,
        **given,
    )
    out = layer(tokens)
    assert out.shape == (3, 4, d)
    # a row of float32 values picked by the right code: equal, not close
    assert np.array_equal(out.detach().numpy().reshape(-1, d), expected.output.astype(np.float32))
    regularizer = collect_regularizer(layer)
    np.testing.assert_allclose(regularizer.item(), expected.regularizer, rtol=1e-5)
    ((out * up).sum() + regularizer).backward()
    layer.step()

    def close(found: torch.Tensor, wanted: np.ndarray) -> None:
        scale = max(1e-3, np.abs(wanted).max())
        np.testing.assert_allclose(numpy(found), wanted.reshape(found.shape), atol=2e-5 * scale)

    assert layer.query.grad is not None
    close(layer.query.grad, expected.grad_query)
    if layer.values.requires_grad:
        close(layer.values.grad, expected.grad_values)
    if method == "sx" and paper:
        close(layer.keys.grad, expected.grad_keys)
    assert not layer.query.grad[[2, 4]].any()  # padding, and a token that is not in the batch
    if paper:
        close(layer.norm_mean, expected.mean)
        close(layer.norm_var, expected.var)


@pytest.mark.parametrize("shared", [False, True])
def test_one_value_is_normalized_by_the_running_statistics(shared: bool) -> None:
    """One token has no spread to divide by, unless its groups share their centroids."""
    torch.manual_seed(0)
    layer = large_start(DPQEmbedding(5, 6, K=4, D=2, schedule="paper", share_subspaces=shared))
    layer(torch.arange(5))
    mean, updates = layer.norm_mean.clone(), float(layer.norm_updates)
    out = layer(torch.tensor([3]))
    assert float(layer.norm_updates) == updates + shared
    assert torch.equal(layer.norm_mean, mean) != shared
    if not shared:
        assert torch.equal(out, layer.eval()(torch.tensor([3])))


# Codes for evaluation --------------------------------------------------------------------------


def near_ties(seed: int, distance: str, D: int, K: int, size: int, shared: bool) -> tuple:
    """Queries (tokens, D, size), keys and statistics full of ties, exact and by a rounding."""
    g = torch.Generator().manual_seed(seed)
    G = 1 if shared else D
    base = torch.randn(G, 1, size, generator=g)
    keys = base + 10.0 ** -(torch.randint(1, 9, (G, K, 1), generator=g)) * torch.randn(
        G, K, size, generator=g
    )
    keys[:, K // 2] = keys[:, 0]  # exact ties
    keys[:, K - 1] = keys[:, 1] * (1 + 2.0**-23)
    tokens = 64
    q = torch.randn(tokens, D, size, generator=g)
    pair = torch.randint(K, (tokens // 2, 2), generator=g)
    # half of the queries lie midway between two keys
    spread = keys.expand(D, K, size)
    q[: tokens // 2] = ((spread[:, pair[:, 0]] + spread[:, pair[:, 1]]) / 2).transpose(0, 1)
    q[5] = 0
    q[6] = 1e-20
    q[7] *= 1e4
    stats = Stats(torch.randn(G, K, generator=g).abs().round() * 1e-3, torch.ones(G, K))
    return q, keys, stats


@pytest.mark.parametrize("distance", ["dot", "euclidean"])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("D,K,size,shared", [(3, 16, 8, False), (4, 5, 1, True), (2, 9, 96, True)])
def test_codes_follow_their_definition_in_near_ties(
    distance: str, normalized: bool, D: int, K: int, size: int, shared: bool
) -> None:
    for seed in range(4):
        q, keys, stats = near_ties(seed, distance, D, K, size, shared)
        given = stats if normalized else None
        wanted = ref.ordered_codes(
            q.numpy(),
            keys.numpy(),
            distance,
            (stats.mean.numpy(), stats.var.numpy()) if normalized else None,
        )
        # The library where it is there, and PyTorch.
        for find in (codes_module.evaluation_codes, codes_module.ordered_codes):
            codes = find(q, keys, DISTANCES[distance], given)
            assert codes.dtype == torch.int64 and np.array_equal(codes.numpy(), wanted)


@pytest.mark.parametrize("distance", ["dot", "euclidean"])
def test_codes_do_not_depend_on_the_batch(distance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, stats = near_ties(11, distance, 3, 16, 24, False)
    codes = evaluation_codes(q, keys, distance, stats)
    alone = torch.cat([evaluation_codes(row.unsqueeze(0), keys, distance, stats) for row in q])
    order = torch.randperm(q.shape[0])
    assert torch.equal(alone, codes)
    assert torch.equal(evaluation_codes(q[order], keys, distance, stats), codes[order])
    strided = torch.stack([q, -q], 1).flatten(0, 1)[::2]
    assert torch.equal(evaluation_codes(strided, keys, distance, stats), codes)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    many = evaluation_codes(q.repeat(10, 1, 1), keys, distance, stats)
    torch.set_num_threads(threads)
    assert torch.equal(many, codes.repeat(10, 1))
    monkeypatch.setattr(codes_module, "_CPU_CHUNK", 100)  # chunks of a few tokens, of one near tie
    assert torch.equal(evaluation_codes(q[:20], keys, distance, stats), codes[:20])
    assert evaluation_codes(q[:0], keys, distance, stats).shape == (0, 3)


def test_a_matrix_product_alone_would_depend_on_the_batch() -> None:
    """What the near-tie rule is for: without it these codes differ from their definition."""
    differ = 0
    for seed in range(20):
        q, keys, _ = near_ties(seed, "dot", 2, 9, 96, True)
        plain = torch.matmul(q, keys[0].t()).argmax(-1)
        differ += int((plain != evaluation_codes(q, keys, "dot", None)).sum())
    assert differ > 0


def test_exact_ties_go_to_the_first_code() -> None:
    keys = torch.ones(2, 5, 3)
    q = torch.randn(7, 2, 3).abs()
    for distance in ("dot", "euclidean"):
        assert not evaluation_codes(q, keys, distance, None).any()


# The proposition -------------------------------------------------------------------------------


def one_hot_rank(codes: torch.Tensor, K: int) -> int:
    B = torch.nn.functional.one_hot(codes.long(), K).flatten(1).double()
    return int(torch.linalg.matrix_rank(B))


def table_rank(codes: torch.Tensor, values: torch.Tensor) -> int:
    dense = CompactEmbedding.from_codes(codes, values, values.shape[0] * values.shape[2]).dense()
    return int(torch.linalg.matrix_rank(dense.double()))


def test_full_rank_proposition() -> None:
    """Full-rank one-hot codes, full-rank values of each group and K D >= d: a full-rank table.

    The one-hot columns of each group add up to the same column of ones, so that the largest rank
    of B is K D - D + 1.
    """
    torch.manual_seed(0)
    n, d, K, D = 400, 32, 12, 4
    layer = DPQEmbedding(n, d, K=K, D=D, method="vq", schedule="warmup")
    layer = large_start(layer).double().eval()
    codes, values = layer.codes(), layer.values.detach()
    assert one_hot_rank(codes, K) == K * D - D + 1
    assert all(int(torch.linalg.matrix_rank(v)) == d // D for v in values)
    assert d <= K * D
    with torch.no_grad():
        assert int(torch.linalg.matrix_rank(layer.weight)) == d  # all three hold: full rank
    # 1) codes that use too little of B: 5 different rows make a table of rank 5
    few = codes[:5].repeat(80, 1)
    assert one_hot_rank(few, K) == 5 and table_rank(few, values) == 5
    # 2) values of one group have rank 3 instead of 8: five dimensions are lost
    flat = values.clone()
    flat[0] = flat[0] @ torch.randn(8, 3).double() @ torch.randn(3, 8).double()
    assert table_rank(codes, flat) == d - 5
    # 3) K D < d: no more than the rank of B
    assert table_rank(codes % 3, values[:, :3]) == one_hot_rank(codes % 3, 3) == 3 * D - D + 1 < d


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("of_keys", [False, True])
def test_gradients_in_chunks_are_those_of_a_softmax(
    shared: bool, of_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both implementations against autograd, through p of w = p - stopgrad(p - onehot)."""
    monkeypatch.setattr(codes_module, "_CPU_CHUNK", 7 * 3 * 5)  # 7 rows at once, the last of 3
    G = 1 if shared else 3
    parts = [torch.randn(31, 3, 4), torch.randn(G, 5, 4), torch.randn(G, 5), torch.randn(G, 5, 2)]
    codes, up = torch.randint(5, (31, 3)), torch.randn(31, 3, 2)
    features, direction, offset, values = (part.clone().requires_grad_() for part in parts)
    spread = direction.expand(3, 5, 4), offset.expand(3, 5), values.expand(3, 5, 2)
    p = (torch.einsum("tjm,jkm->tjk", features, spread[0]) + spread[1]).softmax(-1)
    hot = torch.nn.functional.one_hot(codes, 5).float()
    soft = torch.einsum("tjk,jkx->tjx", p, spread[2].detach())
    hard = torch.einsum("tjk,jkx->tjx", hot, spread[2])
    wanted = torch.autograd.grad(soft + hard, (features, direction, offset, values), up)
    given = (*parts, codes, up, of_keys)
    for found in (softmax_gradients(*given), native.softmax_gradients(*given)):
        if found is None:
            assert not native.available()
            continue
        for i, (one, other) in enumerate(zip(found, wanted)):
            if i in (1, 2) and not of_keys:
                assert one is None
            else:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("distance", ["dot", "euclidean"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [3, 9])  # fewer and more features than keys
def test_statistics_of_a_batch_are_those_of_its_responses(
    distance: str, shared: bool, size: int
) -> None:
    query, keys = torch.randn(50, 4, size) + 1, torch.randn(1 if shared else 4, 6, size)
    found = batch_statistics(query, keys, DISTANCES[distance])
    resp = torch.from_numpy(ref.responses(query.numpy(), keys.numpy(), distance))
    if shared:
        resp = resp.reshape(200, 1, 6)
    assert found is not None
    torch.testing.assert_close(found.mean, resp.mean(0).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.var, resp.var(0, unbiased=False).float(), rtol=1e-4, atol=1e-5)
    one = batch_statistics(query[:1, :1], keys[:1], DISTANCES[distance])
    assert one is None, "one value has no spread"
