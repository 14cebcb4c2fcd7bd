"""Query -> response -> codes -> values, for SX and VQ, and the gradients of both.

Shapes: query (tokens, D, d_key), keys (G, K, d_key), values (G, K, d/D) with G = D, or 1 when
subspaces are shared; response (tokens, D, K); codes (tokens, D). All in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS = 1e-3  # added to the variance of the responses
_TINY = 1e-12  # smallest norm of a query or key that cosine divides by
_CPU_CHUNK = 1 << 19  # responses held at once on a CPU: a few MB, so that they stay in cache
_GPU_CHUNK = 1 << 24


class Stats(NamedTuple):
    """Mean and variance of the responses: (D, K), or (1, K) when subspaces are shared."""

    mean: Tensor
    var: Tensor


def response(query: Tensor, keys: Tensor, distance: str) -> Tensor:
    """How near each query is to each key, larger is nearer: (tokens, D, K)."""
    if distance == "cosine":
        query = query / query.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        keys = keys / keys.norm(dim=-1, keepdim=True).clamp_min(_TINY)
    if distance != "euclidean":
        if keys.shape[0] == 1:
            return torch.matmul(query, keys[0].t())
        return torch.bmm(query.transpose(0, 1), keys.transpose(1, 2)).transpose(0, 1)
    # -|q - k|^2, spelled out so that the (tokens, D, K, d_key) difference is never held
    tokens, D, size = query.shape
    square = keys.pow(2).sum(-1)
    if keys.shape[0] == 1:
        rows = query.reshape(tokens * D, size)
        out = torch.addmm(square[0], rows, keys[0].t(), beta=-1, alpha=2)
        out = out.view(tokens, D, keys.shape[1])
    else:
        groups = query.transpose(0, 1), keys.transpose(1, 2)
        out = torch.baddbmm(square.unsqueeze(1), *groups, beta=-1, alpha=2).transpose(0, 1)
    return out.sub_(query.pow(2).sum(-1, keepdim=True))


def best_codes(score: Tensor) -> Tensor:
    """argmax over the last dimension, the first of several, for training.

    On a CPU argmax takes longer than all else that codes take, for it is not vectorised; here the
    best become K - 1 - k and all others negative, and two vectorised maxima do.
    """
    K = score.shape[-1]
    if score.device.type != "cpu" or not score.numel():
        return score.argmax(-1)
    rank = score - score.amax(-1, keepdim=True)
    rank.mul_(1e30).clamp_min_(-K).add_(torch.arange(K - 1, -1, -1, dtype=score.dtype))
    return (K - 1 - rank.amax(-1).long()).clamp_(0, K - 1)


def batch_normalize(resp: Tensor, shared: bool) -> tuple[Tensor, Stats]:
    """Normalise responses by this batch's own statistics, per k or per (j, k); no affine part."""
    tokens, D, K = resp.shape
    flat = resp.reshape(tokens * D, K) if shared else resp.reshape(tokens, D * K)
    out, mean, invstd = _BatchNorm.apply(flat)
    var = (invstd.pow(-2) - EPS).clamp_min(0)
    return out.view(tokens, D, K), Stats(mean.view(-1, K), var.view(-1, K))


class _BatchNorm(torch.autograd.Function):
    """Batch norm of each column that keeps its output for the gradient, not its input: SX keeps
    the very same tensor, so that one (tokens, D, K) tensor is held instead of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, mean, invstd = torch.native_batch_norm(x, None, None, None, None, True, 0.0, EPS)
        ctx.save_for_backward(out, invstd)
        ctx.mark_non_differentiable(mean, invstd)
        return out, mean, invstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        out, invstd = ctx.saved_tensors
        spread = (grad * out).mean(0)
        return (grad - grad.mean(0)).addcmul_(out, spread, value=-1).mul_(invstd)


def normalize(resp: Tensor, stats: Stats | None) -> Tensor:
    """Normalise responses by given statistics, as evaluation does."""
    if stats is None:
        return resp
    return (resp - stats.mean) * _scale(stats)


def _scale(stats: Stats) -> Tensor:
    return 1 / _sqrt(stats.var + EPS)


def _sqrt(x: Tensor) -> Tensor:
    """The correctly rounded root, alike on every device, which neither rsqrt nor torch's float32
    sqrt is (on CPU it comes from a vector library)."""
    return x.double().sqrt().to(x.dtype)


def _value_rows(codes: Tensor, G: int, K: int) -> Tensor:
    """The row of the flat (G * K, size) value matrix that each code (tokens, D) stands for."""
    if G > 1:
        codes = codes + torch.arange(G, device=codes.device, dtype=codes.dtype) * K
    return codes.reshape(-1)


def look_up(values: Tensor, codes: Tensor) -> Tensor:
    """The value rows of codes (tokens, D): (tokens, D, d/D)."""
    G, K, size = values.shape
    rows = values.reshape(G * K, size).index_select(0, _value_rows(codes, G, K))
    return rows.view(codes.shape[0], codes.shape[1], size)


def _chunks(query: Tensor, K: int) -> list[slice]:
    """Slices of the rows of a query (tokens, D, d_key) whose responses are held at once."""
    limit = _CPU_CHUNK if query.device.type == "cpu" else _GPU_CHUNK
    step = max(1, limit // (query.shape[1] * K))
    return [slice(start, start + step) for start in range(0, query.shape[0], step)]


def sum_by_code(rows: Tensor, codes: Tensor, G: int, K: int) -> Tensor:
    """Sum rows (tokens, D, size) into their codes: (G, K, size)."""
    size = rows.shape[-1]
    out = rows.new_zeros(G * K, size)
    return out.index_add_(0, _value_rows(codes, G, K), rows.reshape(-1, size)).view(G, K, size)


class _SoftmaxExchange(torch.autograd.Function):
    """SX: the hard value row forward; the softmax's gradient backward.

    h_j = w V_j with w = p - stopgrad(p - onehot(code)): dL/dV sees the one-hot w, dL/dw flows
    into the softmax p as if w were p.
    """

    @staticmethod
    def forward(ctx: Any, resp: Tensor, values: Tensor, codes: Tensor, tau: float) -> Tensor:
        ctx.tau = tau
        ctx.save_for_backward(resp, values, codes)
        # Flat, not a view: models may add to their embeddings in place, which autograd forbids
        # for a view that a Function returns.
        G, K, size = values.shape
        return values.reshape(G * K, size).index_select(0, _value_rows(codes, G, K))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        resp, values, codes = ctx.saved_tensors
        grad = grad.reshape(codes.shape[0], codes.shape[1], values.shape[-1])
        grad_resp = grad_values = None
        if ctx.needs_input_grad[0]:
            if values.shape[0] == 1:
                grad_w = torch.matmul(grad, values[0].t())
            else:
                grad_w = torch.bmm(grad.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)
            p = torch.softmax(resp if ctx.tau == 1 else resp / ctx.tau, -1)
            grad_resp = torch._softmax_backward_data(grad_w, p, -1, p.dtype)
            if ctx.tau != 1:
                grad_resp = grad_resp / ctx.tau
        if ctx.needs_input_grad[1]:
            grad_values = sum_by_code(grad, codes, values.shape[0], values.shape[1])
        return grad_resp, grad_values, None, None


class _Recomputed(torch.autograd.Function):
    """SX for many rows whose codes are known: the value rows forward, without any response;
    backward the responses are worked out, a chunk of rows at a time, instead of held."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        codes: Tensor,
        stats: Stats | None,
        distance: str,
        tau: float,
    ) -> Tensor:
        ctx.save_for_backward(query, keys, values, codes, *(stats or ()))
        ctx.distance, ctx.tau = distance, tau
        return look_up(values, codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, codes, *stats = ctx.saved_tensors
        keys = keys.detach().requires_grad_()
        grad_keys = torch.zeros_like(keys)
        rows = []
        for part in _chunks(query, keys.shape[1]):
            shape = query[part].shape
            with torch.enable_grad():
                own = _tokens_of_groups(query[part].detach(), keys).requires_grad_()
                score = _scores(own, keys, ctx.distance)
            scale = 1 / ctx.tau
            resp = score.detach()
            if stats:
                scale = scale * _scale(Stats(*stats)).unsqueeze(-1)
                resp = resp - stats[0].unsqueeze(-1)
            p = torch.softmax(resp * scale, 1)
            grad_w = torch.bmm(values, _tokens_of_groups(grad[part], keys).transpose(1, 2))
            grad_score = torch._softmax_backward_data(grad_w, p, 1, p.dtype) * scale
            row, grad_k = torch.autograd.grad(score, (own, keys), grad_score)
            rows.append(row.view(shape) if keys.shape[0] == 1 else row.transpose(0, 1))
            grad_keys += grad_k
        grad_values = sum_by_code(grad, codes, values.shape[0], values.shape[1])
        return torch.cat(rows), grad_keys, grad_values, None, None, None, None


class _StraightThrough(torch.autograd.Function):
    """VQ: the centroid forward, the gradient straight to the query: q - stopgrad(q - V[code]).

    The values are an input without a gradient, so that a search of the graph for parameters in
    use (DDP's find_unused_parameters) finds them: the regulariser's gradient does reach them.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, centroid: Tensor, values: Tensor) -> Tensor:
        return centroid.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Rotation(torch.autograd.Function):
    """VQ with the rotation trick (Fifty et al., 2024): the centroid e forward; backward, the
    gradient goes through the fixed linear map that rotates and scales the query q onto e.

    With unit vectors q', e' and r = (q' + e') / |q' + e'|, that map is
    R = |e|/|q| (I - 2 r r^T + 2 e' q'^T), and dL/dq = R^T dL/dh. The values are as above.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, centroid: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(query, centroid)
        return centroid.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        query, centroid = ctx.saved_tensors
        q_norm = query.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        e_norm = centroid.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        q, e = query / q_norm, centroid / e_norm
        r = q + e
        r = r / r.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        turned = grad - 2 * r * (r * grad).sum(-1, keepdim=True)
        turned = turned + 2 * q * (e * grad).sum(-1, keepdim=True)
        return turned * (e_norm / q_norm), None, None


def exchange(resp: Tensor, values: Tensor, codes: Tensor, tau: float) -> Tensor:
    """SX's output for given codes: the value rows, with the softmax's gradient."""
    rows = _SoftmaxExchange.apply(resp, values, codes, tau)
    return rows.view(codes.shape[0], codes.shape[1], values.shape[-1])


def exchange_many(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    codes: Tensor,
    stats: Stats | None,
    distance: str,
    tau: float,
) -> Tensor:
    """`exchange` of rows as many as a vocabulary, by given statistics, in little memory."""
    return _Recomputed.apply(query, keys, values, codes, stats, distance, tau)


def straight_through(query: Tensor, centroid: Tensor, values: Tensor, rotation: bool) -> Tensor:
    """VQ's output: the centroids, rows of the values, with a gradient for the queries."""
    function = _Rotation if rotation else _StraightThrough
    return function.apply(query, centroid.detach(), values)


# Codes for evaluation, export and compaction -----------------------------------------------------
#
# A matrix product rounds differently with the shape of the batch, the number of threads and the
# device, so the same token could get one code alone and another in the whole vocabulary. Here a
# code is *defined* by responses that are added up one dimension after the other, in elementwise
# float32 operations that IEEE 754 rounds alike everywhere. The matrix product finds the code
# wherever the best response leads by more than both roundings can amount to; only near ties are
# worked out the slow way.


@torch.no_grad()
def evaluation_codes(query: Tensor, keys: Tensor, distance: str, stats: Stats | None) -> Tensor:
    """Codes (tokens, D), int64, that do not depend on batch shape, threads or device."""
    D = query.shape[1]
    query, keys = query.float(), keys.float()
    bound = _lead_bound(keys, distance, stats)
    parts = [
        _codes_of_chunk(query[part], keys, distance, stats, bound)
        for part in _chunks(query, keys.shape[1])
    ]
    if not parts:
        return torch.empty(0, D, dtype=torch.int64, device=query.device)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _codes_of_chunk(
    query: Tensor, keys: Tensor, distance: str, stats: Stats | None, bound: tuple[Tensor, Tensor]
) -> Tensor:
    rows, D, _ = query.shape
    G, K, _ = keys.shape
    shared = G == 1
    own = _tokens_of_groups(query, keys)
    score = _scores(own, keys, distance)
    if stats is not None:
        score.sub_(stats.mean.unsqueeze(-1)).mul_(_scale(stats).unsqueeze(-1))
    slope, offset = bound
    norm = own.norm(dim=-1)
    if distance == "cosine":
        norm.fill_(1)
    elif distance == "euclidean":
        norm = norm * norm
    lead = slope.unsqueeze(-1) * norm + offset.unsqueeze(-1)  # (G, tokens)
    candidate = (score >= (score.amax(1) - lead).unsqueeze(1)).to(score.dtype)
    up = torch.arange(K, dtype=score.dtype, device=score.device).unsqueeze(-1)
    last = (candidate * up).amax(1)
    first = (K - 1) - candidate.mul_(up.flip(0)).amax(1)
    codes = last.long()
    group, token = (first != last).nonzero(as_tuple=True)
    codes = codes.view(rows, D) if shared else codes.t().contiguous()
    row, group = (token // D, token % D) if shared else (token, group)
    # Each tie takes a copy of its group's keys, K * d_key numbers, unless all groups share them.
    step = max(1, _CPU_CHUNK // (K if shared else keys[0].numel()))
    for start in range(0, row.numel(), step):
        r, j = row[start : start + step], group[start : start + step]
        codes[r, j] = _ordered_codes(query[r, j], keys, j, distance, stats)
    return codes


def _tokens_of_groups(rows: Tensor, keys: Tensor) -> Tensor:
    """Rows (tokens, D, size) by group: (G, tokens, size), each group's lying together.

    Groups that share their keys are so many more tokens of one group.
    """
    if keys.shape[0] == 1:
        return rows.reshape(1, -1, rows.shape[-1])
    return rows.transpose(0, 1).contiguous()


def _scores(query: Tensor, keys: Tensor, distance: str) -> Tensor:
    """`response` of queries (G, tokens, d_key), tokens last: (G, K, tokens).

    Of many rows, this is the better form on a CPU: what follows is vectorised over the tokens.
    """
    if distance == "cosine":
        query = query / query.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        keys = keys / keys.norm(dim=-1, keepdim=True).clamp_min(_TINY)
    if distance != "euclidean":
        return torch.bmm(keys, query.transpose(1, 2))
    square = keys.pow(2).sum(-1, keepdim=True)
    out = torch.baddbmm(square, keys, query.transpose(1, 2), beta=-1, alpha=2)
    return out.sub_(query.pow(2).sum(-1).unsqueeze(1))


def _lead_bound(keys: Tensor, distance: str, stats: Stats | None) -> tuple[Tensor, Tensor]:
    """(slope, offset), each (G,): a lead above slope * |q| (or |q|^2) + offset cannot be rounding.

    The rounding of a sum of m products is at most about m u sum|a b|, u = 2^-24; u is larger
    where the user lets matrix products be less precise (TF32, bfloat16).
    """
    exact = getattr(torch, "get_float32_matmul_precision", lambda: "highest")() == "highest"
    tf32 = keys.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    u = 2.0**-24 if exact and not tf32 else 2.0**-7
    k_norm = keys.norm(dim=-1).amax(-1)  # (G,)
    terms = 4 * (keys.shape[-1] + 8) * u
    if distance == "dot":
        slope, offset = terms * k_norm, torch.zeros_like(k_norm)
    elif distance == "euclidean":  # |q - k|^2 <= 2 |q|^2 + 2 |k|^2
        slope, offset = torch.full_like(k_norm, 2 * terms), 2 * terms * k_norm * k_norm
    else:
        slope, offset = torch.zeros_like(k_norm), torch.full_like(k_norm, terms)
    if stats is not None:
        scale = _scale(stats).amax(-1)
        slope = slope * scale
        offset = (offset + 8 * 2.0**-24 * stats.mean.abs().amax(-1)) * scale
    return 2 * slope, 2 * offset


def _ordered_codes(
    query: Tensor, keys: Tensor, group: Tensor, distance: str, stats: Stats | None
) -> Tensor:
    """Codes of queries (rows, d_key), each of its own group, added up in a fixed order."""
    if distance == "cosine":
        query = query / _ordered_norm(query)
        keys = keys / _ordered_norm(keys)
    own = keys[group] if keys.shape[0] > 1 else keys  # (rows or 1, K, d_key)
    total = None
    for i in range(query.shape[-1]):
        q, k = query[:, i : i + 1], own[..., i]
        if distance == "euclidean":
            term = q - k
            term = -(term * term)
        else:
            term = q * k
        total = term if total is None else total + term
    assert total is not None
    if stats is not None:
        j = group if stats.mean.shape[0] > 1 else torch.zeros_like(group)
        total = (total - stats.mean[j]) * _scale(stats)[j]
    return total.argmax(-1)


def _ordered_norm(rows: Tensor) -> Tensor:
    total = rows[..., 0] * rows[..., 0]
    for i in range(1, rows.shape[-1]):
        total = total + rows[..., i] * rows[..., i]
    return _sqrt(total).clamp_min(_TINY).unsqueeze(-1)
