"""Codes of a file, which no gradient moves, with the rows of additive codes: the second step of Shu
and Nakayama (2018), whose first step is `fairseq-dpq-quantize --form additive_codes`."""

from __future__ import annotations

from torch import Tensor

from fairseq_dpq.codebook import Codebook, Step
from fairseq_dpq.initialization import Trained
from fairseq_dpq.methods.additive import AdditiveMethod, added
from fairseq_dpq.methods.base import Need, Options, Say
from fairseq_dpq.methods.files import read_codes
from fairseq_dpq.methods.random_codes import StoredCodes
from fairseq_dpq.statistics import Shapes


class FixedCodes(AdditiveMethod, StoredCodes):
    """`query` (n, D) holds the codes, the rest is trained."""

    name = "fixed_codes"
    options = ("K", "D", "code_width", "codes")

    def validate(self, c: Options, embedding_dim: int | None, need: Need, say: Say) -> None:
        AdditiveMethod.validate(self, c, embedding_dim, need, say)
        StoredCodes.validate(self, c, embedding_dim, need, say)

    def shapes(self, c: Options, num_embeddings: int, embedding_dim: int) -> Shapes:
        own = super().shapes(c, num_embeddings, embedding_dim)
        return {"query": (num_embeddings, c.D), **own}

    def initialize(self, parameters: dict[str, Tensor], c: Options, tied: bool) -> None:
        """Random codes until a file is read."""
        AdditiveMethod.initialize(self, parameters, c, tied)
        StoredCodes.initialize(self, parameters, c, tied)

    def take_files(self, book: Codebook, c: Options, path: str) -> None:
        if not c.codes:
            raise ValueError(
                "method fixed_codes needs a file of codes; fairseq-dpq-quantize --form "
                "additive_codes, then fairseq-dpq-export, make one of a trained full checkpoint"
            )
        book.query.data.copy_(read_codes(c.codes, tuple(book.query.shape), c.K))

    def train(self, rows: Tensor, book: Codebook, c: Options) -> Step:
        codes = self.codes(rows, book, c)
        out, moments = self.compose(added(None, book.values.float(), codes), book, c)
        return Step(out, codes=codes, moments=moments)

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: Options) -> Tensor:
        return self.rebuild_sums(None, codes, book, c)

    def start_from_table(self, book: Codebook, c: Options, trained: Trained) -> None:
        codes = self.codes(book.query[trained.real], book, c)
        self.fit(book, c, trained.table[trained.real], codes)
