"""Starting values that depend on data: a given table, the first batches, tokens of a dead code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

import torch
import torch.nn.functional as F
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
    fit = points.index_select(1, rows) if rows.numel() < real.shape[1] else points
    centroids = kmeans(fit, c.K, seed=seed, progress=progress)  # (G, K, d/D)
    codes = assign(points, centroids)  # (G, n or n * D)
    mass = means(points, codes, c.K)[1]
    layer.values.copy_(centroids)
    layer.reset_statistics()
    same_space = c.resolved_distance() == "euclidean" and c.key_dim in (None, d // c.D)
    if c.method == "vq" or (same_space and (not c.normalize or d == c.D)):
        layer.query.copy_(table)
        layer.keys_or_values.copy_(centroids)
    else:  # a query may be anything that gives the right code
        layer.keys.copy_(_spread_keys(layer, centroids, mass, seed))
        _pull_queries(layer, layer.keys, _ungroup(codes, n, c.D), 1.0)
    _vocabulary_statistics(layer)
    if c.method == "vq" and c.normalize:
        _settle_centroids(layer, fit, rows, _ungroup(codes, n, c.D))
    if c.kmeans_init:
        layer.start_updates.fill_(c.kmeans_init)  # this was the start
    if c.ema_decay:
        layer.ema_sum.copy_(layer.values)
    if c.method == "sx":  # the best values for the codes that the layer really gives
        best, mass = means(fit, _codes_by_group(layer, rows), c.K)
        layer.values.copy_(torch.where((mass > 0).unsqueeze(-1), best, centroids))


def _spread_keys(layer: DPQEmbedding, centroids: Tensor, mass: Tensor, seed: int) -> Tensor:
    """Unit keys, each nearest to itself by any distance, also when normalised.

    Normalised responses are <q - mean, k> over the deviation of <q, k>: where the queries, which
    are the keys in the numbers `mass` (G, K), have mean 0 and equal variance in all directions,
    that is the cosine, which no key but k itself maximises.
    """
    c = layer.config
    G, K, size = layer.keys.shape
    if size == centroids.shape[-1]:
        keys = centroids - centroids.mean(1, keepdim=True)
    else:
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(G, K, size, generator=generator).to(layer.keys.device)
    keys = F.normalize(keys, dim=-1)
    if not c.normalize or size == 1:  # on a line there are two directions only
        return keys
    share = (mass / mass.sum(1, keepdim=True).clamp_min(1)).unsqueeze(-1)
    for _ in range(20):
        keys = keys - (share * keys).sum(1, keepdim=True)
        spread, axes = torch.linalg.eigh((share * keys).transpose(1, 2) @ keys)  # (G, size)
        scale = 1 / (spread + 1e-2 * spread.amax(1, keepdim=True)).clamp_min(1e-12).sqrt()
        keys = F.normalize((keys @ axes * scale.unsqueeze(1)) @ axes.transpose(1, 2), dim=-1)
    return keys


def _pull_queries(layer: DPQEmbedding, to: Tensor, codes: Tensor, share: float) -> None:
    """Move the queries of tokens by `share` of the way to the row of `to` (G, K, d_key) that
    their codes (n, D) stand for; a code below 0 lets its query be."""
    for start in range(0, codes.shape[0], _ROWS):
        part = codes[start : start + _ROWS]
        rows = layer.query[start : start + _ROWS]
        q = rows.float().view(*part.shape, -1)
        aim = quantizer.look_up(to.float(), part.clamp_min(0))
        moved = torch.where((part >= 0).unsqueeze(-1), q + share * (aim - q), q)
        rows.copy_(moved.view_as(rows))


def _settle_centroids(layer: DPQEmbedding, points: Tensor, rows: Tensor, codes: Tensor) -> None:
    """Make normalised VQ give the codes (n, D) that k-means gave, as nearly as it can.

    Normalised distances prefer other centroids than the nearest. First the queries that got
    another code are drawn to their centroids, then all; where that cannot do, as with groups of
    one or two dimensions, centroids become the means of what they do get, while that helps.
    """
    table = layer.query.detach().clone()
    best = (float("inf"), table, layer.values.detach().clone())

    def take_if_better() -> None:
        nonlocal best
        _vocabulary_statistics(layer)
        got = _codes_by_group(layer, rows)
        error = sum(
            float((p - v[k]).pow(2).sum()) for p, v, k in zip(points, layer.values.float(), got)
        )
        if error < best[0]:
            best = (error, layer.query.detach().clone(), layer.values.detach().clone())

    real = _real_rows(layer)  # padding has no code
    take_if_better()
    for share, everyone in ((0.5, False), (0.5, False), (0.5, False), (1.0, False), (1.0, True)):
        got = layer.codes().long()
        if torch.equal(got[real], codes[real]):
            return
        wanted = codes if everyone else codes.masked_fill(got == codes, -1)
        _pull_queries(layer, layer.values, wanted, share)
        take_if_better()
    layer.query.copy_(table)
    _vocabulary_statistics(layer)
    for _ in range(10):
        mean, mass = means(points, _codes_by_group(layer, rows), layer.config.K)
        layer.values.copy_(torch.where((mass > 0).unsqueeze(-1), mean, layer.values.float()))
        take_if_better()
    layer.query.copy_(best[1])
    layer.values.copy_(best[2])
    _vocabulary_statistics(layer)


def _codes_by_group(layer: DPQEmbedding, rows: Tensor) -> Tensor:
    """The layer's codes (G, rows) of the rows of all points (n, or n * D when shared)."""
    codes = _by_group(layer.codes().long().unsqueeze(-1), layer.config.share_subspaces)
    return codes.squeeze(-1).index_select(1, rows)


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
