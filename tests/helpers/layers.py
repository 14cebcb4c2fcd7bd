"""DPQ layers that are made and trained the same way in every test."""

from __future__ import annotations

import torch

from fairseq_dpq import DPQEmbedding, collect_regularizer

METHODS = [(method, schedule) for method in ("sx", "vq") for schedule in ("warmup", "paper")]


def large_start(layer: DPQEmbedding, seed: int = 0) -> DPQEmbedding:
    """Queries, keys and values from N(0, 1): each code is in use from the beginning."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        if layer.padding_idx is not None:
            layer.query[layer.padding_idx].zero_()
    layer.reset_statistics()
    return layer


def make(n: int = 50, d: int = 24, padding_idx: int | None = 1, **options: object) -> DPQEmbedding:
    """A layer with the paper's schedule, if not told otherwise, and a large start."""
    own: dict = {"K": 8, "D": 4, "schedule": "paper", **options}
    return large_start(DPQEmbedding(n, d, padding_idx, **own))


def train(layer: DPQEmbedding, steps: int = 3, lr: float = 0.3) -> DPQEmbedding:
    """Real steps: the layer's output is drawn to fixed random rows, by SGD."""
    g = torch.Generator().manual_seed(1)
    target = torch.randn(layer.num_embeddings, layer.embedding_dim, generator=g)
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr)
    layer.train()
    for _ in range(steps):
        tokens = torch.randint(layer.num_embeddings, (3, 11), generator=g)
        loss = (layer(tokens) - target[tokens]).pow(2).sum(-1).mean() + collect_regularizer(layer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layer
