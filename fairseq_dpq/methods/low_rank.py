"""Low rank: rows of a narrow table times one matrix, n x r times r x d. The paper's baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_dpq.config import option
from fairseq_dpq.forms.low_rank import factorize
from fairseq_dpq.methods.base import Method, MethodOptions, Need
from fairseq_dpq.training.codebook import Codebook
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.trackers import Shapes


@dataclass
class LowRankOptions(MethodOptions):
    rank: int = option(
        0,
        "columns of the narrow table; gives the ratio d / rank",
        valid=lambda rank: rank >= 1,
        right="method low_rank needs a rank of 1 or more; try 32",
        shapes=True,
    )


class LowRank(Method[LowRankOptions]):
    """`query` (n, r) is the narrow table, `values` (r, d) the matrix. There are no codes."""

    name = "low_rank"
    summary = "no codes, a narrow table times a matrix"
    options = LowRankOptions
    sized_by = ("rank",)
    forms = ("low_rank",)
    stored = ("query", "values")

    def validate(self, c: LowRankOptions, embedding_dim: int | None, need: Need) -> None:
        if embedding_dim is not None:
            need(c.rank <= embedding_dim, "rank", f"exceeds the embedding size {embedding_dim}")

    def shapes(self, c: LowRankOptions, num_embeddings: int, embedding_dim: int) -> Shapes:
        return {"query": (num_embeddings, c.rank), "values": (c.rank, embedding_dim)}

    def codes(self, rows: Tensor, book: Codebook, c: LowRankOptions) -> Tensor:
        return rows.new_empty(len(rows), 0, dtype=torch.int64)

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: LowRankOptions) -> Tensor:
        return rows.float() @ book.values.float()

    def start_from_table(self, book: Codebook, c: LowRankOptions, trained: Trained) -> None:
        left, right = factorize(trained.table * trained.real.unsqueeze(1), c.rank)
        book.query.copy_(left)
        book.values.copy_(right)

    def learned(self, book: Codebook, c: LowRankOptions, codes: Tensor | None) -> dict[str, Tensor]:
        return {"left": book.query.detach(), "right": book.values.detach()}
