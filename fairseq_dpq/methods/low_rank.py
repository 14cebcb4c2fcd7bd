"""Low rank: rows of a narrow table times one matrix, n x r times r x d. The paper's baseline."""

from __future__ import annotations

from torch import Tensor

from fairseq_dpq.codebook import Codebook, Step
from fairseq_dpq.forms.base import Wanted
from fairseq_dpq.forms.low_rank import LowRankEmbedding, factorize
from fairseq_dpq.initialization import Trained
from fairseq_dpq.methods.base import Method, Need, Options, Say
from fairseq_dpq.statistics import Shapes


class LowRank(Method):
    """`query` (n, r) is the narrow table, `values` (r, d) the matrix. There are no codes."""

    name = "low_rank"
    options = ("rank",)
    switch = "rank"
    has_codes = False

    def validate(self, c: Options, embedding_dim: int | None, need: Need, say: Say) -> None:
        need(c.rank >= 1, "rank", "method low_rank needs a rank of 1 or more; try 32")
        if embedding_dim is not None:
            need(c.rank <= embedding_dim, "rank", f"exceeds the embedding size {embedding_dim}")

    def shapes(self, c: Options, num_embeddings: int, embedding_dim: int) -> Shapes:
        return {"query": (num_embeddings, c.rank), "values": (c.rank, embedding_dim)}

    def train(self, rows: Tensor, book: Codebook, c: Options) -> Step:
        return Step(rows.float() @ book.values.float())

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: Options) -> Tensor:
        return rows.float() @ book.values.float()

    def start_from_table(self, book: Codebook, c: Options, trained: Trained) -> None:
        left, right = factorize(trained.table * trained.real.unsqueeze(1), c.rank)
        book.query.copy_(left)
        book.values.copy_(right)

    def bits(self, c: Options, num_embeddings: int, embedding_dim: int) -> int:
        return 32 * c.rank * (num_embeddings + embedding_dim)

    def compact(
        self, book: Codebook, c: Options, codes: Tensor | None, wanted: Wanted
    ) -> LowRankEmbedding:
        left, right = book.query.detach(), book.values.detach()
        kind = wanted.dtype or left.dtype
        return LowRankEmbedding.from_factors(left.to(kind), right.to(kind), wanted.padding_idx)

    def describe(self, c: Options) -> str:
        return f"low_rank r={c.rank}"

    def extra_repr(self, c: Options) -> str:
        return f"rank={c.rank}, method={self.name}"
