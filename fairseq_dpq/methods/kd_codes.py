"""K-way D-dimensional codes (Chen et al., 2018): free logits give the codes, a mean of code vectors
and a linear map the row; with or without distillation from a trained table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_dpq.config import option
from fairseq_dpq.forms.additive_codes import STEPS, learn_codes
from fairseq_dpq.methods.additive import AdditiveMethod, AdditiveOptions, added
from fairseq_dpq.methods.base import START
from fairseq_dpq.methods.files import read_table
from fairseq_dpq.training.codebook import Codebook, RegularizerTerm, TrainOutput
from fairseq_dpq.training.distances import batch_normalize
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.trackers import RunningStatistics, Shapes, Tracker


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

    def initialize(self, parameters: dict[str, Tensor], c: KDOptions, tied: bool) -> None:
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
        self._logit_statistics(book, c, real)
        super().first_statistics(book, c, real)

    def _logit_statistics(self, book: Codebook, c: KDOptions, real: Tensor) -> None:
        assert book.stats is not None
        logits = book.query[real].view(-1, c.K).float()
        var, mean = torch.var_mean(logits, 0, unbiased=False)
        book.stats.mean.copy_(mean.unsqueeze(0))
        book.stats.var.copy_(var.unsqueeze(0))

    def _response(self, normed: Tensor, book: Codebook) -> Tensor:
        scale, shift = (book.tensors[f"logit_{name}"].float() for name in ("scale", "shift"))
        return normed * scale + shift

    def _running_response(self, rows: Tensor, book: Codebook, c: KDOptions) -> Tensor:
        logits = rows.float().view(-1, c.D, c.K)
        assert book.stats is not None
        return self._response(book.stats.normalize(logits), book)

    def train(self, rows: Tensor, book: Codebook, c: KDOptions) -> TrainOutput:
        logits = rows.float().view(-1, c.D, c.K)
        own = {}
        if len(logits) < 2:
            response = self._running_response(rows, book, c)
        else:
            normed, own["norm"] = batch_normalize(logits, True)
            response = self._response(normed, book)
        codes = response.detach().argmax(-1)
        out, moments = self.compose(added(response, book.values.float(), codes), book, c)
        regularizer = None
        if c.distill_from and torch.is_grad_enabled() and len(out):
            assert book.tokens is not None
            wanted = F.embedding(book.tokens, book.tensors["guide"]).float()
            error = (out - wanted).pow(2).mean(1).sum()
            regularizer = RegularizerTerm(c.distill_weight * error, error.detach(), len(out))
        return TrainOutput(out, codes=codes, regularizer=regularizer, moments={**own, **moments})

    def codes(self, rows: Tensor, book: Codebook, c: KDOptions) -> Tensor:
        with torch.no_grad():
            return self._running_response(rows, book, c).argmax(-1)

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: KDOptions) -> Tensor:
        grad = torch.is_grad_enabled()
        response = self._running_response(rows, book, c) if grad else None
        return self.rebuild_sums(response, codes, book, c)

    def start_from_table(self, book: Codebook, c: KDOptions, trained: Trained) -> None:
        table, real = trained.table, trained.real
        codes, _ = learn_codes(table, c.K, c.D, real, STEPS, trained.seed, trained.progress)
        # A logit above the others of its group; batch norm keeps its lead.
        book.query.zero_()
        book.query.view(-1, c.D, c.K).scatter_(2, codes.unsqueeze(-1), 5 * START)
        self._logit_statistics(book, c, real)
        self.fit(book, c, table[real], self.codes(book.query[real], book, c))
