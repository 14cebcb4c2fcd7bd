"""Methods whose codes no gradient moves: drawn once and kept, the control (`random_codes`), or of a
file, with the rows of additive codes (`fixed_codes`). The latter is the second step of Shu and
Nakayama (2018), whose first step is `fairseq-dpq-quantize --form additive_codes`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

import torch
from torch import Tensor

from fairseq_dpq.config import option
from fairseq_dpq.files.reader import read_form
from fairseq_dpq.forms import FORMS
from fairseq_dpq.methods.additive import AdditiveMethod, AdditiveOptions
from fairseq_dpq.methods.base import CO, Method, Need, ProductMethod, ProductOptions
from fairseq_dpq.training.codebook import Codebook
from fairseq_dpq.training.codes import by_group
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.kmeans import means
from fairseq_dpq.training.trackers import Shapes

MAX_STORED = 256  # bfloat16 holds whole numbers up to here


class StoredCodes(Method[CO]):
    """`query` (n, D) holds the codes themselves, as floating-point numbers, because averaging of
    weights and half precision take nothing else. Rows are those of another base class."""

    def validate(self, c: CO, embedding_dim: int | None, need: Need) -> None:
        need(
            (c.K or 0) <= MAX_STORED, "K", f"stored codes are below {MAX_STORED}; take a smaller K"
        )

    def shapes(self, c: CO, num_embeddings: int, embedding_dim: int) -> Shapes:
        shapes = super().shapes(c, num_embeddings, embedding_dim)
        shapes.pop("query", None)
        return {"query": (num_embeddings, c.D), **shapes}

    def constants(self, c: CO) -> tuple[str, ...]:
        return ("query",)

    def initialize(self, parameters: Mapping[str, Tensor], c: CO, tied: bool) -> None:
        super().initialize(parameters, c, tied)
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

    def start_from_table(self, book: Codebook, c: RandomOptions, trained: Trained) -> None:
        """The values nearest to the table with these codes: means of its parts."""
        table, real = trained.table, trained.real
        groups, K, _ = book.values.shape
        codes = self.codes(book.query[real], book, c)
        parts = by_group(table[real].view(len(codes), c.D, -1), groups)
        best, mass = means(parts, by_group(codes.unsqueeze(-1), groups).squeeze(-1), K)
        book.values.copy_(torch.where((mass > 0).unsqueeze(-1), best, book.values.float()))


@dataclass
class FixedOptions(AdditiveOptions):
    codes: str = option(None, "file of fairseq-dpq-export that has the codes of the table")


class FixedCodes(StoredCodes[FixedOptions], AdditiveMethod[FixedOptions]):
    """Random codes until a file is read; all else is trained."""

    name = "fixed_codes"
    summary = "kd_codes with the codes of a file (Shu and Nakayama, 2018)"
    options = FixedOptions

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


def read_codes(file: str, shape: tuple[int, ...], K: int) -> Tensor:
    """The codes (n, D) of a file of fairseq-dpq-export; ValueError if they do not fit."""
    if not Path(file).is_file():
        raise ValueError(f"there is no file of codes {file}")
    form = read_form(file, FORMS)
    codes = form.unpacked_codes()
    if codes is None:
        raise ValueError(f"{file} holds a table of kind {form.kind}, which has no codes")
    if tuple(codes.shape) != shape:
        raise ValueError(
            f"{file} has {codes.shape[1]} codes for each of {codes.shape[0]} rows; this table has "
            f"{shape[0]} rows, and D is {shape[1]}"
        )
    if codes.numel() and int(codes.max()) >= K:
        raise ValueError(f"{file} has the code {int(codes.max())}; K is {K}")
    return codes
