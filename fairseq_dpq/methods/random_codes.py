"""Frozen random codes: the control. Codes are drawn once and kept, the values are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

import torch
from torch import Tensor

from fairseq_dpq.methods.base import CO, Method, Need, ProductMethod, ProductOptions
from fairseq_dpq.training.codebook import Codebook
from fairseq_dpq.training.codes import by_group, look_up
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.kmeans import means
from fairseq_dpq.training.trackers import Shapes

MAX_STORED = 256  # bfloat16 holds whole numbers up to here


class StoredCodes(Method[CO]):
    """Codes that no gradient moves: `query` (n, D) holds the codes themselves.

    As floating-point numbers, because averaging of weights and half precision take nothing else.
    """

    def validate(self, c: CO, embedding_dim: int | None, need: Need) -> None:
        need(
            (c.K or 0) <= MAX_STORED, "K", f"stored codes are below {MAX_STORED}; take a smaller K"
        )

    def constants(self, c: CO) -> tuple[str, ...]:
        return ("query",)

    def initialize(self, parameters: Mapping[str, Tensor], c: CO, tied: bool) -> None:
        query = parameters["query"]
        query.copy_(torch.randint(c.K, query.shape, device=query.device))

    def codes(self, rows: Tensor, book: Codebook, c: CO) -> Tensor:
        return rows.detach().long()


@dataclass
class RandomOptions(ProductOptions):
    pass


class RandomCodes(StoredCodes[RandomOptions], ProductMethod[RandomOptions]):
    """Rows put together from values (G, K, d/D), as those of sx and vq."""

    name = "random_codes"
    summary = "codes drawn once and kept, values trained"
    options = RandomOptions

    def shapes(self, c: RandomOptions, num_embeddings: int, embedding_dim: int) -> Shapes:
        return {**super().shapes(c, num_embeddings, embedding_dim), "query": (num_embeddings, c.D)}

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: RandomOptions) -> Tensor:
        return look_up(book.values.float(), codes).flatten(1)

    def start_from_table(self, book: Codebook, c: RandomOptions, trained: Trained) -> None:
        """The values nearest to the table with these codes: means of its parts."""
        table, real = trained.table, trained.real
        groups, K, _ = book.values.shape
        codes = self.codes(book.query[real], book, c)
        parts = by_group(table[real].view(len(codes), c.D, -1), groups)
        best, mass = means(parts, by_group(codes.unsqueeze(-1), groups).squeeze(-1), K)
        book.values.copy_(torch.where((mass > 0).unsqueeze(-1), best, book.values.float()))
