"""DPQ worked out in NumPy, float64, from the equations alone: what the layer's tests compare with.
Shapes: queries (n, D, d_key), keys (G, K, d_key), values (G, K, d/D), G = D or 1 when shared."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

EPS = 1e-3


class Result(NamedTuple):
    """What one training step gives."""

    output: np.ndarray  # (tokens, d)
    codes: np.ndarray  # (tokens, D), -1 for padding
    regularizer: float
    grad_query: np.ndarray  # (n, D, d_key)
    grad_keys: np.ndarray  # (G, K, d_key); VQ: zeros
    grad_values: np.ndarray  # (G, K, d/D)
    mean: np.ndarray  # (G, K) statistics of the responses of this batch
    var: np.ndarray


def group(matrix: np.ndarray, j: int) -> np.ndarray:
    """The keys or values of group j."""
    return matrix[j if matrix.shape[0] > 1 else 0]


def responses(q: np.ndarray, keys: np.ndarray, distance: str) -> np.ndarray:
    """(tokens, D, K), one number at a time."""
    tokens, D, _ = q.shape
    out = np.empty((tokens, D, keys.shape[1]))
    for t in range(tokens):
        for j in range(D):
            for k, key in enumerate(group(keys, j)):
                x = q[t, j]
                if distance == "dot":
                    out[t, j, k] = x @ key
                else:
                    out[t, j, k] = -((x - key) ** 2).sum()
    return out


def response_gradients(
    grad: np.ndarray, q: np.ndarray, keys: np.ndarray, distance: str
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the queries and keys, given that of the responses."""
    grad_q, grad_k = np.zeros_like(q), np.zeros_like(keys)
    tokens, D, K = grad.shape
    for t in range(tokens):
        for j in range(D):
            g = j if keys.shape[0] > 1 else 0
            for k in range(K):
                x, y, up = q[t, j], keys[g, k], grad[t, j, k]
                if distance == "dot":
                    dx, dy = y, x
                else:
                    dx, dy = -2 * (x - y), 2 * (x - y)
                grad_q[t, j] += up * dx
                grad_k[g, k] += up * dy
    return grad_q, grad_k


def train_step(
    tokens: np.ndarray,
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    grad_output: np.ndarray,
    *,
    method: str,
    distance: str,
    normalize: bool,
    tau: float | np.ndarray = 1.0,
    regularizer_weight: float = 1.0,
    commitment: float = 0.0,
    value_gradient: float = 0.0,
    padding_idx: int | None = None,
) -> Result:
    """Forward and backward of loss = sum(output * grad_output) + regulariser for one batch."""
    real = np.array([t for t, token in enumerate(tokens) if token != padding_idx], dtype=int)
    q = query[tokens[real]]  # (real, D, d_key)
    up = grad_output[real].reshape(len(real), q.shape[1], -1)
    resp = responses(q, keys, distance)
    # per k over tokens and groups when subspaces are shared, else per (j, k) over tokens
    axis = (0, 1) if keys.shape[0] == 1 else (0,)
    mean, var = resp.mean(axis, keepdims=True), resp.var(axis, keepdims=True)
    deviation = np.sqrt(var + EPS)
    score = (resp - mean) / deviation if normalize else resp
    codes = score.argmax(-1)
    hard = np.stack(
        [
            np.stack([group(values, j)[codes[t, j]] for j in range(q.shape[1])])
            for t in range(len(real))
        ]
    )
    grad_query = np.zeros_like(query)
    grad_keys, grad_values = np.zeros_like(keys), np.zeros_like(values)
    regularizer = 0.0
    if method == "sx":
        exp = np.exp((score - score.max(-1, keepdims=True)) / tau)
        p = exp / exp.sum(-1, keepdims=True)
        grad_w = np.stack(
            [up[:, j] @ group(values, j).T for j in range(q.shape[1])], 1
        )  # (real, D, K)
        grad_score = p * (grad_w - (p * grad_w).sum(-1, keepdims=True)) / tau
        if normalize:
            grad_resp = (
                grad_score
                - grad_score.mean(axis, keepdims=True)
                - score * (grad_score * score).mean(axis, keepdims=True)
            ) / deviation
        else:
            grad_resp = grad_score
        grad_q, grad_keys = response_gradients(grad_resp, q, keys, distance)
        for t in range(len(real)):
            for j in range(q.shape[1]):
                grad_values[j if values.shape[0] > 1 else 0, codes[t, j]] += up[t, j]
    else:
        count = len(q)
        difference = hard - q
        regularizer = (regularizer_weight + commitment) * (difference**2).sum() / count
        grad_q = up - 2 * commitment * difference / count
        for t in range(len(real)):
            for j in range(q.shape[1]):
                g = j if values.shape[0] > 1 else 0
                pull = 2 * regularizer_weight * difference[t, j] / count
                grad_values[g, codes[t, j]] += pull + value_gradient * up[t, j]
    np.add.at(grad_query, tokens[real], grad_q)
    output = np.zeros_like(grad_output)
    output[real] = hard.reshape(len(real), -1)
    all_codes = np.full((len(tokens), q.shape[1]), -1)
    all_codes[real] = codes
    G, K = keys.shape[:2]
    return Result(
        output,
        all_codes,
        regularizer,
        grad_query,
        grad_keys,
        grad_values,
        mean.reshape(G, K),
        var.reshape(G, K),
    )


def ordered_codes(
    q: np.ndarray,
    keys: np.ndarray,
    distance: str,
    stats: tuple[np.ndarray, np.ndarray] | None,
) -> np.ndarray:
    """Codes by responses added up one dimension after the other in float32: the definition that
    evaluation, export and compaction share."""
    f = np.float32
    q, keys = q.astype(f), np.broadcast_to(keys, (q.shape[1], *keys.shape[1:])).astype(f)
    total = None
    for i in range(q.shape[-1]):
        x, y = q[:, :, i, None], keys[None, :, :, i]
        term = -((x - y) * (x - y)) if distance == "euclidean" else x * y
        total = term if total is None else total + term
    assert total is not None and total.dtype == f
    if stats is not None:
        mean, var = stats[0].astype(f), stats[1].astype(f)
        total = (total - mean) * (f(1) / np.sqrt(var + f(EPS)))
    return total.argmax(-1)
