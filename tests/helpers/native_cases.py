"""Random compact tables and queries for the tests of the native library."""

from __future__ import annotations

import contextlib
import random
from typing import Any, Iterator

import pytest
import torch
from torch import Tensor

from fairseq_dpq import CompactEmbedding, native
from fairseq_dpq.forms.packing import pack_codes
from fairseq_dpq.training.distances import Stats

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_form(rng: random.Random, **fixed: Any) -> CompactEmbedding:
    """A CompactEmbedding of random shape: even, uneven or shared groups, packed or not."""
    D = fixed.get("D") or rng.choice([1, 2, 3, 7, 8, 16, 17, 33, 300])
    K = fixed.get("K") or rng.choice([1, 2, 3, 16, 31, 32, 33, 60, 64, 100, 256, 257, 1000])
    size = rng.choice([1, 2, 3, 4, 5, 8, 16])
    n = rng.choice([1, 2, 5, 63, 64, 65, 130, 500])
    shared = D > 1 and rng.random() < 0.3
    even = shared or rng.random() < 0.5
    sizes = [K] * D if even else [rng.randint(1, K) for _ in range(D)]
    form = CompactEmbedding(
        n,
        D * size,
        rng.choice([None, 0, n - 1]),
        K=K,
        D=D,
        sizes=sizes,
        share_subspaces=shared,
        packed=fixed.get("packed", rng.random() < 0.5),
        dtype=rng.choice(DTYPES),
    )
    form.values[: form.value_rows].copy_(torch.randn(form.value_rows, size))
    codes = torch.stack([torch.randint(s, (n,)) for s in sizes], 1)
    form.codes.copy_(pack_codes(codes, form.bits) if form.packed else codes)
    return form


def table_of(form: CompactEmbedding) -> native.Table:
    how = (form.sizes, form.share_subspaces, form.packed, form.padding_idx)
    table = native.table(native.Buffers(form.codes, form.values, *how))
    assert table is not None
    return table


def by_pytorch(form: CompactEmbedding, indices: Tensor) -> Tensor:
    """The rows of a form, looked up without the library."""
    with no_library(form):
        return form(indices)


@contextlib.contextmanager
def no_library(form: CompactEmbedding | None = None) -> Iterator[None]:
    """As where the library is not built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.library, "load", lambda: None)
        if form is not None:
            patch.setattr(form, "_fast", None)
        yield


def random_query(rng: random.Random) -> tuple[Tensor, Tensor, str, Stats | None]:
    """Queries, keys, distance and statistics; most have ties: equal keys, queries between keys."""
    D = rng.choice([1, 2, 3, 8, 17])
    size = rng.choice([1, 2, 3, 4, 5, 8, 9, 16, 17, 40])
    K = rng.choice([1, 2, 5, 16, 32, 100])
    G = rng.choice([1, D])
    n = rng.choice([1, 5, 63, 64, 65, 200])
    query, keys = torch.randn(n, D, size), torch.randn(G, K, size)
    if rng.random() < 0.6:
        query, keys = query.mul(2).round() / 2, keys.mul(2).round()
    if K > 1 and rng.random() < 0.5:
        keys[:, K - 1] = keys[:, 0]
    if K > 1 and rng.random() < 0.5:  # halfway between two keys
        query[0] = (keys[:, 0] + keys[:, 1]).div(2).expand(D, size)
    if rng.random() < 0.1:
        query[0, 0, 0] = rng.choice([float("nan"), float("inf"), 1e30])
    if rng.random() < 0.1:
        keys[0, K // 2, 0] = float("nan")
    stats = None
    if rng.random() < 0.5:
        stats = Stats(torch.randn(G, K).mul(3).round(), torch.rand(G, K))
    return query, keys, rng.choice(["dot", "euclidean"]), stats
