"""A small model with every kind of embedding table that `compress` has to tell apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS, PAIRS, SMALL, BAG, SIZE = 600, 500, 50, 700, 16
PAD = 3


def rows_of_few_parts(n: int, seed: int, parts: int = 8) -> Tensor:
    """A table (n, SIZE) whose pairs of numbers take `parts` values: codes can spell it exactly."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SIZE // 2, parts, 2, generator=generator)
    codes = torch.randint(parts, (n, SIZE // 2), generator=generator)
    return values[torch.arange(SIZE // 2), codes].reshape(n, SIZE)


class Toy(nn.Module):
    """`token` has padding and is tied to `output`, `first` is shared with `second`, a module of its
    own, and with `same`; `position` is small; `bag` is an EmbeddingBag."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(ROWS, SIZE, padding_idx=PAD)
        self.first = nn.Embedding(PAIRS, SIZE)
        self.second = nn.Embedding(PAIRS, SIZE)
        self.second.weight = self.first.weight
        self.same = self.first
        self.position = nn.Embedding(SMALL, SIZE)
        self.bag = nn.EmbeddingBag(BAG, SIZE)
        self.output = nn.Linear(SIZE, ROWS)
        self.output.weight = self.token.weight
        with torch.no_grad():
            self.token.weight.copy_(rows_of_few_parts(ROWS, 1))
            self.token.weight[PAD] = 0
            self.first.weight.copy_(rows_of_few_parts(PAIRS, 2))

    def forward(self, ids: Tensor) -> Tensor:
        pairs = self.first(ids) + 2 * self.second(ids.flip(1)) + 3 * self.same(ids)
        bags = self.bag(ids.reshape(-1, 1)).view(*ids.shape, SIZE)
        return self.output(self.token(ids) + pairs + self.position(ids % SMALL) + bags)


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().eval()


def some_ids() -> Tensor:
    ids = torch.randint(PAIRS, (3, 7), generator=torch.Generator().manual_seed(5))
    ids[0, 0] = PAD
    return ids
