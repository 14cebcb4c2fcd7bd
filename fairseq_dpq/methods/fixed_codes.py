"""Codes of a file, which no gradient moves, with the rows of additive codes: the second step of Shu
and Nakayama (2018), whose first step is `fairseq-dpq-quantize --form additive_codes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from torch import Tensor

from fairseq_dpq.config import option
from fairseq_dpq.methods.additive import AdditiveMethod, AdditiveOptions
from fairseq_dpq.methods.files import read_codes
from fairseq_dpq.methods.random_codes import StoredCodes
from fairseq_dpq.training.codebook import Codebook
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.trackers import Shapes


@dataclass
class FixedOptions(AdditiveOptions):
    codes: str = option(None, "file of fairseq-dpq-export that has the codes of the table")


class FixedCodes(AdditiveMethod[FixedOptions], StoredCodes[FixedOptions]):
    """`query` (n, D) holds the codes, the rest is trained."""

    name = "fixed_codes"
    summary = "kd_codes with the codes of a file (Shu and Nakayama, 2018)"
    options = FixedOptions

    def shapes(self, c: FixedOptions, num_embeddings: int, embedding_dim: int) -> Shapes:
        own = super().shapes(c, num_embeddings, embedding_dim)
        return {"query": (num_embeddings, c.D), **own}

    def initialize(self, parameters: Mapping[str, Tensor], c: FixedOptions, tied: bool) -> None:
        """Random codes until a file is read."""
        AdditiveMethod.initialize(self, parameters, c, tied)
        StoredCodes.initialize(self, parameters, c, tied)

    def load_option_files(self, book: Codebook, c: FixedOptions, path: str) -> None:
        if not c.codes:
            raise ValueError(
                "method fixed_codes needs a file of codes; fairseq-dpq-quantize --form "
                "additive_codes, then fairseq-dpq-export, make one of a trained full checkpoint"
            )
        book.query.data.copy_(read_codes(c.codes, tuple(book.query.shape), c.K))

    def start_from_table(self, book: Codebook, c: FixedOptions, trained: Trained) -> None:
        codes = self.codes(book.query[trained.real], book, c)
        self.fit(book, c, trained.table[trained.real], codes)
