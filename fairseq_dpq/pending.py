"""What forward passes leave behind for the statistics, and how it is applied on all workers alike.

Sums are kept apart from the layer until `apply`, which adds them up over the workers first; every
worker then does the same arithmetic on the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_dpq import starts
from fairseq_dpq.quantizer import Stats, sum_by_code

if TYPE_CHECKING:
    from fairseq_dpq.embedding import DPQEmbedding

_SAMPLE = 1024  # queries kept as seeds for codes that nobody uses


class Pending:
    """Sums over the micro-batches of one update."""

    def __init__(self) -> None:
        self.count = 0  # tokens behind the response statistics
        self.response_sum: Tensor | None = None
        self.response_square: Tensor | None = None
        self.used: Tensor | None = None  # (G, K) tokens of each code
        self.sums: Tensor | None = None  # (G, K, d/D) their queries, for EMA
        self.tokens: Tensor | None = None  # (n,) times each token was seen, for the k-means start
        self.seeds: Tensor | None = None  # (rows, D, d_key) queries for re-seeding
        self.seed_codes: Tensor | None = None

    def add_stats(self, stats: Stats, count: int) -> None:
        """Take in the statistics of one micro-batch of `count` tokens."""
        mean, var = stats.mean.double(), stats.var.double()
        self.count += count
        self.response_sum = _plus(self.response_sum, mean * count)
        self.response_square = _plus(self.response_square, (var + mean * mean) * count)

    @torch.no_grad()
    def add_codes(self, layer: DPQEmbedding, query: Tensor, codes: Tensor) -> None:
        """Take in which codes one micro-batch used, and its queries."""
        G, K, _ = layer.values.shape
        ones = torch.ones(*codes.shape, 1, device=codes.device)
        self.used = _plus(self.used, sum_by_code(ones, codes, G, K).squeeze(-1).double())
        if layer.config.ema_decay:
            self.sums = _plus(self.sums, sum_by_code(query, codes, G, K).double())
        if layer.config.reseed_after and query.shape[0]:
            self.seeds, self.seed_codes = query[:_SAMPLE].clone(), codes[:_SAMPLE].clone()

    def add_tokens(self, layer: DPQEmbedding, tokens: Tensor) -> None:
        """Take in the tokens themselves while the k-means start collects them."""
        if int(layer.start_updates) < layer.config.kmeans_init:
            seen = torch.bincount(tokens.long(), minlength=layer.num_embeddings)
            self.tokens = _plus(self.tokens, seen)

    @torch.no_grad()
    def apply(self, layer: DPQEmbedding, rate: float) -> bool:
        """Add up over the workers and move the layer's statistics; True if parameters were set."""
        c = layer.config
        G, K, size = layer.values.shape
        zeros = torch.zeros(G, K, dtype=torch.float64, device=layer.query.device)
        # Every worker sends the same shapes, also one whose batch was empty.
        parts: list[Tensor] = []
        if c.normalize:
            parts += [
                zeros.new_full((1,), self.count),
                zeros if self.response_sum is None else self.response_sum,
                zeros if self.response_square is None else self.response_square,
            ]
        if c.ema_decay or c.reseed_after:
            parts.append(zeros if self.used is None else self.used)
        if c.ema_decay:
            parts.append(zeros.new_zeros(G, K, size) if self.sums is None else self.sums)
        collecting = bool(c.kmeans_init) and int(layer.start_updates) < c.kmeans_init
        if collecting:
            tokens = zeros.new_zeros(layer.num_embeddings) if self.tokens is None else self.tokens
            parts.append(tokens.double())
        if not parts:
            return False
        summed = iter(_sum_over_workers(parts))
        if c.normalize:
            self._move_statistics(layer, rate, next(summed), next(summed), next(summed))
        used = next(summed) if c.ema_decay or c.reseed_after else None
        if used is not None and c.ema_decay:
            self._move_centroids(layer, used.float(), next(summed).float())
        changed = False
        if collecting:
            layer.start_counts += next(summed).float()
            layer.start_updates += 1
            if int(layer.start_updates) == c.kmeans_init:
                starts.start_from_queries(layer)
                changed = True
        if used is not None and c.reseed_after:
            changed = self._reseed(layer, used) or changed
        if changed:
            # All that a start or a new seed sets; the queries, which are large, stay as they are.
            for tensor in (layer.keys_or_values, layer.values, *layer.buffers()):
                _copy_from_first_worker(tensor)
        return changed

    def _move_statistics(
        self, layer: DPQEmbedding, rate: float, count: Tensor, total: Tensor, square: Tensor
    ) -> None:
        some = count > 0
        mean = total / count.clamp_min(1)
        var = (square / count.clamp_min(1) - mean * mean).clamp_min(0)
        layer.norm_updates += some.float().view(())
        # A plain average at first, so that the initial 0 and 1 leave no trace.
        step = (1 / layer.norm_updates.clamp_min(1).double()).clamp_min(rate) * some
        layer.norm_mean += (step * (mean - layer.norm_mean)).float()
        layer.norm_var += (step * (var - layer.norm_var)).float()

    def _move_centroids(self, layer: DPQEmbedding, used: Tensor, sums: Tensor) -> None:
        decay = layer.config.ema_decay
        layer.ema_count.mul_(decay).add_(used, alpha=1 - decay)
        layer.ema_sum.mul_(decay).add_(sums, alpha=1 - decay)
        moved = layer.ema_sum / layer.ema_count.clamp_min(1e-12).unsqueeze(-1)
        hit = (used > 0).unsqueeze(-1)
        layer.values.copy_(torch.where(hit, moved, layer.values.float()))

    def _reseed(self, layer: DPQEmbedding, used: Tensor) -> bool:
        layer.idle.add_(1).masked_fill_(used > 0, 0)
        dead = layer.idle >= layer.config.reseed_after
        if not bool(dead.any()):
            return False
        if self.seeds is not None and self.seed_codes is not None:
            starts.reseed(layer, dead, self.seeds, self.seed_codes)
        layer.idle.masked_fill_(dead, 0)
        return True


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _workers() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _sum_over_workers(parts: list[Tensor]) -> list[Tensor]:
    if _workers() == 1:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    return [f.view_as(p) for f, p in zip(flat.split([p.numel() for p in parts]), parts)]


def _copy_from_first_worker(tensor: Tensor) -> None:
    if _workers() > 1:
        dist.broadcast(tensor.data, 0)
