"""DPQ layers that are made and trained the same way in every test."""

from __future__ import annotations

import torch

from fairseq_dpq import DPQEmbedding, collect_regularizer

METHODS = [("sx", "dot"), ("sx", "euclidean"), ("sx", "cosine"), ("vq", "euclidean")]


def make(n: int = 50, d: int = 24, padding_idx: int | None = 1, **options: object) -> DPQEmbedding:
    torch.manual_seed(0)
    return DPQEmbedding(n, d, padding_idx, **{"K": 8, "D": 4, **options})


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
