"""K-way D-dimensional codes (Chen et al., 2018): free logits give the codes, a mean of code vectors
and a linear map the row; with or without distillation from a trained table."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_dpq.config import option
from fairseq_dpq.files.reader import is_safetensors
from fairseq_dpq.forms.additive_codes import STEPS, learn_codes
from fairseq_dpq.methods.additive import (
    AdditiveMethod,
    AdditiveOptions,
    Moments,
    affine,
    normalized,
    set_running,
)
from fairseq_dpq.methods.base import START
from fairseq_dpq.training.codebook import Codebook, RegularizerTerm, TrainOutput
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.trackers import RunningStatistics, Shapes, Tracker

_TAKES = "; it takes one table (n, d) as .pt or .safetensors, or in fairseq a full checkpoint"


@dataclass
class KDOptions(AdditiveOptions):
    distill_from: str = option(
        None,
        "full checkpoint, or a table saved as a tensor, that the embeddings are drawn to",
        shapes=True,
    )
    distill_weight: float = option(
        1000.0,
        "weight of the squared distance from the table of --dpq-distill-from",
        valid=lambda w: w >= 0,
        right="must not be negative; try 1000",
    )


class KDCodes(AdditiveMethod[KDOptions]):
    """`query` (n, D * K) are the logits. Batch norm over tokens and groups, with `logit_scale` and
    `logit_shift` (K,), makes of them the responses. `guide` (n, d) is the table to distil from."""

    name = "kd_codes"
    summary = "free logits, mean of code vectors, linear map (Chen et al., 2018)"
    options = KDOptions

    def shapes(self, c: KDOptions, num_embeddings: int, embedding_dim: int) -> Shapes:
        own = super().shapes(c, num_embeddings, embedding_dim)
        shapes: Shapes = {"query": (num_embeddings, c.D * c.K), **own}
        shapes.update(logit_scale=(c.K,), logit_shift=(c.K,))
        if c.distill_from:
            shapes["guide"] = (num_embeddings, embedding_dim)
        return shapes

    def constants(self, c: KDOptions) -> tuple[str, ...]:
        return ("guide",) if c.distill_from else ()

    def trackers(self, c: KDOptions, shapes: Shapes) -> list[Tracker]:
        return [RunningStatistics("norm", (1, c.K)), *super().trackers(c, shapes)]

    def initialize(self, parameters: Mapping[str, Tensor], c: KDOptions, tied: bool) -> None:
        super().initialize(parameters, c, tied)
        # Small, so that one update can change a code; as the queries of sx.
        parameters["query"].normal_(0, START)
        parameters["logit_scale"].fill_(1)
        parameters["logit_shift"].zero_()
        if "guide" in parameters:
            parameters["guide"].zero_()

    def load_option_files(self, book: Codebook, c: KDOptions, path: str) -> None:
        if c.distill_from:
            guide = book.tensors["guide"]
            guide.data.copy_(read_table(c.distill_from, path, tuple(guide.shape)))

    def first_statistics(self, book: Codebook, c: KDOptions, real: Tensor) -> None:
        set_running(book, "norm", book.query[real].view(-1, c.K).float())
        super().first_statistics(book, c, real)

    def responses(
        self, rows: Tensor, book: Codebook, c: KDOptions, moments: Moments | None = None
    ) -> Tensor:
        logits = rows.float().view(-1, c.D, c.K)
        return affine(normalized(logits, "norm", book, moments), "logit", book)

    def train(self, rows: Tensor, book: Codebook, c: KDOptions) -> TrainOutput:
        seen = super().train(rows, book, c)
        out = seen.rows
        if not (c.distill_from and torch.is_grad_enabled() and len(out)):
            return seen
        assert book.tokens is not None
        wanted = F.embedding(book.tokens, book.tensors["guide"]).float()
        error = (out - wanted).pow(2).mean(1).sum()
        term = RegularizerTerm(c.distill_weight * error, error.detach(), len(out))
        return seen._replace(regularizer=term)

    def codes(self, rows: Tensor, book: Codebook, c: KDOptions) -> Tensor:
        with torch.no_grad():
            return self.responses(rows, book, c).argmax(-1)

    def start_from_table(self, book: Codebook, c: KDOptions, trained: Trained) -> None:
        table, real = trained.table, trained.real
        codes, _ = learn_codes(table, c.K, c.D, real, STEPS, trained.seed, trained.progress)
        # A logit above the others of its group; batch norm keeps its lead.
        book.query.zero_()
        book.query.view(-1, c.D, c.K).scatter_(2, codes.unsqueeze(-1), 5 * START)
        set_running(book, "norm", book.query[real].view(-1, c.K).float())
        self.fit(book, c, table[real], self.codes(book.query[real], book, c))


def read_table(file: str, path: str, shape: tuple[int, ...]) -> Tensor:
    """The table (n, d) at `path` of a full checkpoint, or, without a path, the only tensor of that
    shape in a file; ValueError if there is none."""
    if not Path(file).is_file():
        raise ValueError(f"there is no checkpoint {file} to distil from")
    try:
        found = _tensors(file)
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f"{file} is not a fairseq checkpoint, or it is damaged{_TAKES}") from error
    if not path:
        fits = [tensor for tensor in found.values() if tuple(tensor.shape) == shape]
        if len(fits) != 1:
            raise ValueError(f"{file} has {len(fits)} tensors of shape {shape}{_TAKES}")
        return fits[0]
    table = found.get(f"{path}.weight", found.get(""))
    if table is None:
        raise ValueError(f"{file} has no full table {path}.weight")
    if tuple(table.shape) != shape:
        raise ValueError(f"{file}: {path}.weight is {tuple(table.shape)}, this table is {shape}")
    return table


def _tensors(file: str) -> dict[str, Tensor]:
    """The tensors of a file by name: of a checkpoint's model, of a state_dict, or a single one."""
    if is_safetensors(file):
        from safetensors.torch import load_file

        return load_file(file)
    how = {"mmap": True} if "mmap" in inspect.signature(torch.load).parameters else {}
    found = torch.load(file, map_location="cpu", **how)
    if isinstance(found, Tensor):
        return {"": found}
    return {name: t for name, t in found.get("model", found).items() if isinstance(t, Tensor)}
