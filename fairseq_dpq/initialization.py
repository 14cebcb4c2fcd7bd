"""Starting values that depend on data: another table's numbers, k-means of a trained table or of
the first queries. What only one method needs stands with that method."""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch import Tensor

from fairseq_dpq.codebook import Codebook
from fairseq_dpq.codes import by_group, evaluation_codes, look_up
from fairseq_dpq.distances import Dot
from fairseq_dpq.kmeans import assign, kmeans, means

_ROWS = 1 << 15


def checked_padding(num_embeddings: int, padding_idx: int | None) -> int | None:
    """The padding row counted from 0; raises if the table has no such row, or no row at all."""
    if num_embeddings < 1:
        raise ValueError(f"num_embeddings={num_embeddings}: must be 1 or more")
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(
            f"padding_idx={padding_idx}: must be within the {num_embeddings} rows of the "
            f"table, from {-num_embeddings} to {num_embeddings - 1}"
        )
    return padding_idx % num_embeddings


def draw_like(parameters: dict[str, Tensor], table: Tensor, padding_idx: int | None) -> None:
    """Fill queries, keys and values with numbers drawn from a freshly initialised table."""
    table = table.detach()
    pool = table[real_rows(table, padding_idx)].reshape(-1)
    if pool.numel() == 0:
        pool = table.reshape(-1)
    for name, parameter in parameters.items():
        if name == "query" and parameter.shape == table.shape:
            parameter.copy_(table)
        else:
            pick = torch.randint(pool.numel(), (parameter.numel(),), device=pool.device)
            parameter.copy_(pool[pick].view_as(parameter))


def real_rows(table: Tensor, padding_idx: int | None) -> Tensor:
    """Which rows of a table are not padding: (n,) bool."""
    real = torch.ones(table.shape[0], dtype=torch.bool, device=table.device)
    if padding_idx is not None and table.shape[0] > 1:
        real[padding_idx] = False
    return real


class Trained(NamedTuple):
    """A trained table (n, d) to begin at."""

    table: Tensor
    real: Tensor  # (n,): False for padding
    seed: int = 0
    progress: Callable[[int], None] | None = None


class Clusters(NamedTuple):
    """k-means of a table's subspaces, and how to compare a codebook with it."""

    points: Tensor  # (G, rows, d/D) the parts of all rows but padding
    rows: Tensor  # (rows,) which of the n (shared: n * D) parts these are
    centroids: Tensor  # (G, K, d/D)
    codes: Tensor  # (n, D) nearest centroids, padding too
    mass: Tensor  # (G, K) rows of each centroid


@torch.no_grad()
def cluster_table(trained: Trained, groups: int, K: int, D: int) -> Clusters:
    """k-means in each group of a table."""
    table, real = trained.table, trained.real
    n = table.shape[0]
    points = by_group(table.view(n, D, -1), groups)  # (G, n or n * D, d/D)
    rows = by_group(real.view(n, 1, 1).expand(n, D, 1), groups)[0, :, 0].nonzero().squeeze(1)
    fit = points.index_select(1, rows) if rows.numel() < points.shape[1] else points
    centroids = kmeans(fit, K, seed=trained.seed, progress=trained.progress)
    codes = assign(points, centroids)
    mass = means(points, codes, K)[1]
    by_row = codes.view(n, D) if groups == 1 and D > 1 else codes.t().contiguous()
    return Clusters(fit, rows, centroids, by_row, mass)


def table_codes(book: Codebook, D: int, distance: Dot) -> Tensor:
    """The codes (n, D) that a codebook gives to all its rows."""
    n = book.query.shape[0]
    keys = book.keys.detach()
    parts = [
        evaluation_codes(rows.float().view(rows.shape[0], D, -1), keys, distance, book.stats)
        for rows in book.query.detach().split(_ROWS)
    ]
    return torch.cat(parts) if n else book.query.new_empty(0, D).long()


def grouped_codes(codes: Tensor, groups: int, rows: Tensor) -> Tensor:
    """Codes (n, D) as `Clusters.points` has their rows: (G, rows)."""
    return by_group(codes.unsqueeze(-1), groups).squeeze(-1).index_select(1, rows)


def pull_queries(book: Codebook, to: Tensor, codes: Tensor, share: float) -> None:
    """Move queries by `share` of the way to the row of `to` (G, K, key size) that their codes
    (n, D) stand for. A code below 0 leaves its query where it is."""
    for start in range(0, codes.shape[0], _ROWS):
        part = codes[start : start + _ROWS]
        rows = book.query[start : start + _ROWS]
        q = rows.float().view(*part.shape, -1)
        aim = look_up(to.float(), part.clamp_min(0))
        moved = torch.where((part >= 0).unsqueeze(-1), q + share * (aim - q), q)
        rows.copy_(moved.view_as(rows))


@torch.no_grad()
def vocabulary_statistics(book: Codebook, D: int, distance: Dot, real: Tensor) -> None:
    """Set the running statistics to those of the whole vocabulary."""
    if book.stats is None:
        return
    keys = book.keys.float()
    shared, K = keys.shape[0] == 1, keys.shape[1]
    total = torch.zeros_like(book.stats.mean, dtype=torch.float64)
    square, count = torch.zeros_like(total), 0
    step = max(1, (1 << 22) // (D * K))
    for start in range(0, book.query.shape[0], step):
        rows = book.query[start : start + step][real[start : start + step]].float()
        resp = distance.response(rows.view(rows.shape[0], D, -1), keys).double()
        if shared:
            resp = resp.reshape(-1, 1, K)
        total += resp.sum(0)
        square += resp.pow(2).sum(0)
        count += resp.shape[0]
    mean = total / max(count, 1)
    book.stats.mean.copy_(mean)
    book.stats.var.copy_((square / max(count, 1) - mean * mean).clamp_min(0))


@torch.no_grad()
def start_from_queries(book: Codebook, counts: Tensor, D: int) -> None:
    """Start the keys by k-means of the queries of seen tokens, weighted by `counts` (n,)."""
    seen = counts.nonzero().squeeze(1)
    groups, K, _ = book.keys.shape
    q = book.query[seen].float().view(seen.numel(), D, -1)
    weight = counts[seen].float()
    if groups == 1:
        weight = weight.repeat_interleave(D)
    book.keys.copy_(kmeans(by_group(q, groups), K, weight=weight))


def reseed_keys(
    book: Codebook, dead: Tensor, query: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put the keys of dead codes (G, K) on random queries (rows, D, key size).

    Returns group and code of each, and the row and group of the query it was put on.
    """
    group, code = dead.nonzero(as_tuple=True)
    row = torch.randint(query.shape[0], (group.numel(),), device=query.device)
    source = group
    if book.keys.shape[0] == 1:
        source = torch.randint(query.shape[1], (group.numel(),), device=query.device)
    book.keys[group, code] = query[row, source].to(book.keys.dtype)
    return group, code, row, source
