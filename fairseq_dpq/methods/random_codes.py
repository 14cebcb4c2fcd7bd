"""Frozen random codes: the control. Codes are drawn once and kept, the values are trained."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_dpq.codebook import Codebook, Step
from fairseq_dpq.codes import by_group, look_up
from fairseq_dpq.initialization import Trained
from fairseq_dpq.kmeans import means
from fairseq_dpq.methods.base import Method, Need, Options, ProductMethod, Say
from fairseq_dpq.statistics import Shapes

MAX_STORED = 256  # bfloat16 holds whole numbers up to here


class StoredCodes(Method):
    """Codes that no gradient moves: `query` (n, D) holds the codes themselves.

    As floating-point numbers, because averaging of weights and half precision take nothing else.
    """

    def validate(self, c: Options, embedding_dim: int | None, need: Need, say: Say) -> None:
        need(c.K <= MAX_STORED, "K", f"stored codes are below {MAX_STORED}; take a smaller K")

    def constants(self, c: Options) -> tuple[str, ...]:
        return ("query",)

    def initialize(self, parameters: dict[str, Tensor], c: Options, tied: bool) -> None:
        query = parameters["query"]
        query.copy_(torch.randint(c.K, query.shape, device=query.device))

    def codes(self, rows: Tensor, book: Codebook, c: Options) -> Tensor:
        return rows.detach().long()


class RandomCodes(StoredCodes, ProductMethod):
    """Rows put together from values (G, K, d/D), as those of sx and vq."""

    name = "random_codes"
    options = ("K", "D", "share_subspaces")

    def shapes(self, c: Options, num_embeddings: int, embedding_dim: int) -> Shapes:
        groups = 1 if c.share_subspaces else c.D
        return {"query": (num_embeddings, c.D), "values": (groups, c.K, embedding_dim // c.D)}

    def train(self, rows: Tensor, book: Codebook, c: Options) -> Step:
        codes = self.codes(rows, book, c)
        return Step(look_up(book.values.float(), codes).flatten(1), codes=codes)

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: Options) -> Tensor:
        return look_up(book.values.float(), codes).flatten(1)

    def start_from_table(self, book: Codebook, c: Options, trained: Trained) -> None:
        """The values nearest to the table with these codes: means of its parts."""
        table, real = trained.table, trained.real
        groups, K, _ = book.values.shape
        codes = self.codes(book.query[real], book, c)
        parts = by_group(table[real].view(len(codes), c.D, -1), groups)
        best, mass = means(parts, by_group(codes.unsqueeze(-1), groups).squeeze(-1), K)
        book.values.copy_(torch.where((mass > 0).unsqueeze(-1), best, book.values.float()))
