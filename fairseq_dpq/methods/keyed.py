"""What SX and VQ share: codes are the keys nearest to a query in each group, learned by one of two
schedules.

`warmup`: the table is plain at first, k-means gives the codes, and quantised rows take over along a
ramp; keys follow their queries by an average, and the nearest one gives the code, in training as in
evaluation. `paper`: codes from the first update on, by responses that are normalised over each
batch in training and by running statistics in evaluation; all of it is moved by gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping, TypeVar

import torch
from torch import Tensor

from fairseq_dpq.config import option
from fairseq_dpq.methods.base import START, ProductMethod, ProductOptions, TableUse
from fairseq_dpq.training.codebook import Codebook, TrainOutput
from fairseq_dpq.training.codes import by_group, evaluation_codes
from fairseq_dpq.training.distances import DISTANCES, Dot, batch_statistics
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.kmeans import kmeans
from fairseq_dpq.training.trackers import (
    IdleCodes,
    KeyAverage,
    RunningStatistics,
    Shapes,
    Tracker,
    WarmUp,
)

_DECAY = 0.9  # of the average that keys follow, where no option says it
_SHORTEST = 8  # updates of a training that has room for a warm-up
_SMALLEST, _LARGEST = 0.002, 0.06  # bounds of a start that follows the table's own scale


@dataclass
class KeyedOptions(ProductOptions):
    """Of SX and VQ."""

    schedule: str = option(
        None,
        "warmup: a plain table at first, then k-means, then a ramp to quantised rows; paper: "
        "quantised from the first update on, by distances normalised over each batch (default: "
        "warmup, or paper where the length of the training is not known)",
        choices=("warmup", "paper"),
        shapes=True,
    )
    warmup_updates: int = option(
        None,
        "first updates in which the table is a plain one; k-means of it then gives the codes "
        "(default: an eighth of the training, a quarter if tied)",
        valid=lambda x: x >= 1,
        right="must be 1 or more; the schedule without a warm-up is called paper",
        needs="schedule=warmup",
        keeps=True,
    )
    ramp_updates: int = option(
        None,
        "updates after the warm-up over which quantised rows take the place of plain ones "
        "(default: half of the training)",
        valid=lambda x: x >= 0,
        right="must be 0 (off) or a number of updates",
        needs="schedule=warmup",
        keeps=True,
    )
    reseed_after: int = option(
        0,
        "re-seed a code that no token has used for this many updates (0: off)",
        valid=lambda x: x >= 0,
        right="must be 0 (off) or a number of updates",
    )

    @property
    def by_paper(self) -> bool:
        return self.schedule == "paper"

    @property
    def by_dot(self) -> bool:
        """Whether codes are by dot products, not by distances."""
        return self.by_paper


KO = TypeVar("KO", bound=KeyedOptions)


class KeyedMethod(ProductMethod[KO]):
    """Codes are the keys nearest to a query in each group."""

    compared = "values"  # the parameter that has the keys
    starts_wide = False  # whether the start has the scale of the table's own initialiser

    def distance(self, c: KO) -> Dot:
        """How queries are compared with keys."""
        return DISTANCES["dot" if c.by_dot else "euclidean"]

    def shapes(self, c: KO, num_embeddings: int, embedding_dim: int) -> Shapes:
        shapes = super().shapes(c, num_embeddings, embedding_dim)
        return {**shapes, self.compared: shapes["values"]}

    def constants(self, c: KO) -> tuple[str, ...]:
        return () if c.by_paper else (self.compared,)

    def defaults(self, c: KO, use: TableUse) -> dict[str, Any]:
        own = super().defaults(c, use)
        # docs/quality.md has the study behind these numbers. A tied table has more to learn before
        # its codes are worth anything.
        share = use.max_update // (4 if use.tied else 8)
        warmup = c.warmup_updates or (share if use.max_update >= _SHORTEST else None)
        schedule = c.schedule or ("warmup" if warmup or use.trained else "paper")
        if schedule == "paper" or warmup is None:
            return {**own, "schedule": schedule}
        ramp = use.max_update // 2
        return {**own, "schedule": schedule, "warmup_updates": warmup, "ramp_updates": ramp}

    def describe_start(self, c: KO) -> str:
        if c.warmup_updates:
            last = c.warmup_updates + (c.ramp_updates or 0)
            return (
                f"plain until update {c.warmup_updates}, then k-means gives the codes; all "
                f"quantised from update {last} on"
            )
        return f"schedule {c.schedule}: no warm-up, quantised from the first update on"

    def collapse_hints(self, c: KO) -> list[tuple[str, Any]]:
        own: list[tuple[str, Any]] = [] if c.reseed_after else [("reseed_after", 1000)]
        return [*own, ("schedule", "warmup")] if c.by_paper else own

    def initialize(self, parameters: Mapping[str, Tensor], c: KO, tied: bool) -> None:
        """Draw from N(0, s) with a small s: what a large random start adds to a row is noise, which
        the codes would have to spell out. s is half the deviation of the table's own initialiser,
        if that is small; a tied table starts larger, because an output layer is slow to learn from
        rows near 0.

        In the paper's schedule N(0, 1), nn.Embedding's, is scaled down to s. VQ keeps any other
        start of the table, of its centroids at least: from a smaller one most stay unused.
        """
        query, keys = parameters["query"], parameters[self.compared]
        scale = START
        if not query.is_meta:
            half = float(query.float().std(unbiased=False)) / 2
            scale = min(max(half, _SMALLEST), _LARGEST)
        for parameter in (query, keys):
            wide = self.starts_wide and not (parameter is query and c.by_dot)
            s = scale if tied or wide else min(START, scale)
            drawn = c.by_paper and not parameter.is_meta
            if drawn and parameter.float().std(unbiased=False) > 0.5:
                parameter.mul_(s)
            elif not (c.by_paper and wide):
                parameter.normal_(0, s)

    def trackers(self, c: KO, shapes: Shapes) -> list[Tracker]:
        keys = shapes["values"]
        out: list[Tracker] = []
        if c.warmup_updates:
            out.append(WarmUp(c.warmup_updates, c.ramp_updates or 0))
        if c.by_paper:
            out.append(RunningStatistics("norm", keys[:2]))
        else:
            out.append(KeyAverage(keys, getattr(c, "ema_decay", _DECAY)))
        if c.reseed_after:
            out.append(IdleCodes(keys[:2], c.reseed_after))
        return out

    def by_group(self, rows: Tensor, c: KO) -> Tensor:
        """Query rows in float32: (tokens, D, key size)."""
        return rows.float().view(rows.shape[0], c.D, rows.shape[1] // c.D)

    def codes(self, rows: Tensor, book: Codebook, c: KO) -> Tensor:
        stats = book.stats().detach() if c.by_paper else None
        q = self.by_group(rows.detach(), c)
        return evaluation_codes(q, book.keys.detach(), self.distance(c), stats)

    def train(self, rows: Tensor, book: Codebook, c: KO) -> TrainOutput:
        if not c.by_paper:
            return super().train(rows, book, c)
        keys = book.keys.float().clone()
        batch = batch_statistics(self.by_group(rows, c), keys, self.distance(c))
        if batch is None:  # a single row has no spread; the running statistics serve
            return super().train(rows, book, c)
        own = {**book.tensors, "norm_mean": batch.mean, "norm_var": batch.var}
        seen = super().train(rows, replace(book, tensors=own), c)
        return seen._replace(moments={"norm": batch.detach()})

    def trains_on_eval_codes(self, c: KO) -> bool:
        return not c.by_paper

    def observe(self, rows: Tensor, codes: Tensor, book: Codebook, c: KO) -> TrainOutput:
        return TrainOutput(rows, self.by_group(rows.detach(), c), codes)

    @torch.no_grad()
    def start_from_table(self, book: Codebook, c: KO, trained: Trained) -> None:
        if c.by_paper:
            raise ValueError(
                "schedule paper, and what needs it, is for a random start; leave it out to start "
                "from a full table"
            )
        if trained.table is not book.query:
            book.query.copy_(trained.table)
        groups, K, size = book.values.shape
        points = by_group(trained.table[trained.real].view(-1, c.D, size), groups)
        book.values.copy_(kmeans(points, K, seed=trained.seed, progress=trained.progress))
        book.keys.copy_(book.values)
