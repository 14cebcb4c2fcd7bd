"""Starting values that depend on data: a given table, the first batches, tokens of a dead code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

import torch
from torch import Tensor

from fairseq_dpq import quantizer
from fairseq_dpq.kmeans import assign, kmeans, means

if TYPE_CHECKING:
    from fairseq_dpq.embedding import DPQEmbedding

_ROWS = 1 << 15


def draw_like(layer: DPQEmbedding, table: Tensor) -> None:
    """Fill queries, keys and values with numbers drawn from a freshly initialised table."""
    table = table.detach()
    if layer.padding_idx is not None:
        keep = torch.ones(table.shape[0], dtype=torch.bool, device=table.device)
        keep[layer.padding_idx] = False
        pool = table[keep].reshape(-1)
    else:
        pool = table.reshape(-1)
    if pool.numel() == 0:
        pool = table.reshape(-1)
    for name, parameter in layer.named_parameters():
        if name == "query" and parameter.shape == table.shape:
            parameter.copy_(table)
        else:
            pick = torch.randint(pool.numel(), (parameter.numel(),), device=pool.device)
            parameter.copy_(pool[pick].view_as(parameter))


@torch.no_grad()
def start_from_table(
    layer: DPQEmbedding,
    table: Tensor,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Set a layer so that its rows come near those of a trained table (n, d)."""
    c = layer.config
    n, d = table.shape
    points = _by_group(table.view(n, c.D, -1), c.share_subspaces)  # (G, n or n * D, d/D)
    real = _by_group(_real_rows(layer).view(n, 1).expand(n, c.D).unsqueeze(-1), c.share_subspaces)
    rows = real[0, :, 0].nonzero().squeeze(1)  # padding is no point
    fit = points.index_select(1, rows) if rows.numel() and rows.numel() < real.shape[1] else points
    centroids = kmeans(fit, c.K, seed=seed, progress=progress)  # (G, K, d/D)
    if c.method == "vq" or (c.resolved_distance() == "euclidean" and c.key_dim in (None, d // c.D)):
        layer.query.copy_(table)
        layer.keys_or_values.copy_(centroids)
    else:
        _point_at_codes(layer, _ungroup(assign(points, centroids), n, c.D), centroids, seed)
    if c.method == "sx":
        layer.values.copy_(centroids)
    layer.reset_statistics()
    _vocabulary_statistics(layer)
    if c.method == "sx":  # the best values for the codes that the layer really gives
        codes = _by_group(layer.codes().long().unsqueeze(-1), c.share_subspaces).squeeze(-1)
        best, mass = means(fit, codes.index_select(1, rows) if fit is not points else codes, c.K)
        layer.values.copy_(torch.where((mass > 0).unsqueeze(-1), best, centroids))


def _point_at_codes(layer: DPQEmbedding, codes: Tensor, centroids: Tensor, seed: int) -> None:
    """Give each token the key of its code as query; keys are directions that differ."""
    keys = layer.keys
    G, K, size = keys.shape
    directions = centroids - centroids.mean(1, keepdim=True)
    if size != centroids.shape[-1]:
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(G, K, size, generator=generator).to(keys.device)
    keys.copy_(directions / directions.norm(dim=-1, keepdim=True).clamp_min(1e-12))
    for start in range(0, codes.shape[0], _ROWS):
        part = codes[start : start + _ROWS]
        layer.query[start : start + _ROWS] = (
            quantizer.look_up(keys.float(), part).reshape(part.shape[0], -1).to(layer.query.dtype)
        )


def _vocabulary_statistics(layer: DPQEmbedding) -> None:
    """Set the running statistics to those of the whole vocabulary."""
    c = layer.config
    if not c.normalize:
        return
    keys = layer.keys_or_values.float()
    total = torch.zeros_like(layer.norm_mean, dtype=torch.float64)
    square, count = torch.zeros_like(total), 0
    real = _real_rows(layer)
    step = max(1, (1 << 22) // (c.D * c.K))
    for start in range(0, layer.num_embeddings, step):
        rows = layer.query[start : start + step][real[start : start + step]].float()
        q = rows.view(rows.shape[0], c.D, -1)
        resp = quantizer.response(q, keys, c.resolved_distance()).double()
        if c.share_subspaces:
            resp = resp.reshape(-1, 1, c.K)
        total += resp.sum(0)
        square += resp.pow(2).sum(0)
        count += resp.shape[0]
    mean = total / max(count, 1)
    layer.norm_mean.copy_(mean)
    layer.norm_var.copy_((square / max(count, 1) - mean * mean).clamp_min(0))
    layer.norm_updates.fill_(1)


@torch.no_grad()
def start_from_queries(layer: DPQEmbedding) -> None:
    """Start the keys by k-means of the queries of the tokens seen so far, as often as seen."""
    c = layer.config
    seen = layer.start_counts.nonzero().squeeze(1)
    if not seen.numel():
        return
    q = layer.query[seen].float().view(seen.numel(), c.D, -1)
    weight = layer.start_counts[seen].float()
    if c.share_subspaces:
        weight = weight.repeat_interleave(c.D)
    layer.keys_or_values.copy_(kmeans(_by_group(q, c.share_subspaces), c.K, weight=weight))
    layer.start_counts.zero_()
    if c.ema_decay:
        layer.ema_sum.copy_(layer.values)
        layer.ema_count.fill_(1)
    if c.normalize:
        layer.norm_updates.zero_()


@torch.no_grad()
def reseed(layer: DPQEmbedding, dead: Tensor, query: Tensor, codes: Tensor) -> None:
    """Put dead codes (G, K) on the queries (rows, D, d_key) of tokens that were just seen.

    An SX code also takes over the value of the token's present code, so that the token's
    embedding does not jump when it changes to the new code.
    """
    c = layer.config
    keys = layer.keys_or_values
    G = keys.shape[0]
    group, code = dead.nonzero(as_tuple=True)
    row = torch.randint(query.shape[0], (group.numel(),), device=query.device)
    source = group if G > 1 else torch.randint(c.D, (group.numel(),), device=query.device)
    keys[group, code] = query[row, source].to(keys.dtype)
    if c.method == "sx":
        layer.values[group, code] = layer.values[group, codes[row, source]]
    if c.ema_decay:
        layer.ema_sum[group, code] = layer.values[group, code].float()
        layer.ema_count[group, code] = 1


def _real_rows(layer: DPQEmbedding) -> Tensor:
    real = torch.ones(layer.num_embeddings, dtype=torch.bool, device=layer.query.device)
    if layer.padding_idx is not None and layer.num_embeddings > 1:
        real[layer.padding_idx] = False
    return real


def _by_group(rows: Tensor, shared: bool) -> Tensor:
    """(n, D, size) -> (D, n, size), or (1, n * D, size) when subspaces are shared."""
    if shared:
        return rows.reshape(1, -1, rows.shape[-1])
    return rows.transpose(0, 1).contiguous()


def _ungroup(codes: Tensor, n: int, D: int) -> Tensor:
    """(D, n) or (1, n * D) codes -> (n, D)."""
    return codes.view(n, D) if codes.shape[0] == 1 and D > 1 else codes.t().contiguous()
