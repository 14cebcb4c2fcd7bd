"""What SX and VQ share: codes are the keys nearest to a query in each group, learned by one of two
schedules.

`warmup`: the table is plain at first, k-means gives the codes, and quantised rows take over along a
ramp; keys follow their queries by an average, and the nearest one gives the code, in training as in
evaluation. `paper`: codes from the first update on, by responses that are normalised over each
batch in training and by running statistics in evaluation; all of it is moved by gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairseq_dpq.config import option
from fairseq_dpq.methods.base import (
    START,
    ProductMethod,
    ProductOptions,
    TableUse,
    half_scale,
)
from fairseq_dpq.training.codebook import Codebook, RegularizerTerm, TrainOutput
from fairseq_dpq.training.codes import evaluation_codes
from fairseq_dpq.training.distances import DISTANCES, Dot, batch_statistics
from fairseq_dpq.training.initialization import Trained, cluster_table
from fairseq_dpq.training.trackers import (
    IdleCodes,
    RunningStatistics,
    Shapes,
    Tracker,
    WarmUp,
)

_SHORTEST = 8  # updates of a training that has room for a warm-up


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


KO = TypeVar("KO", bound=KeyedOptions)


class KeyedMethod(ProductMethod[KO]):
    """Codes are the keys nearest to a query in each group."""

    drawn: tuple[str, ...]  # parameters that start at one scale

    def distance(self, c: KO) -> Dot:
        """How queries are compared with keys."""
        return DISTANCES["euclidean"]

    def shapes(self, c: KO, num_embeddings: int, embedding_dim: int) -> Shapes:
        groups = 1 if c.share_subspaces else c.D
        return {
            "query": (num_embeddings, embedding_dim),
            "values": (groups, c.K, embedding_dim // c.D),
        }

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

    def initialize(self, parameters: dict[str, Tensor], c: KO, tied: bool) -> None:
        """Draw from N(0, s) with a small s: what a large random start adds to a row is noise, which
        the codes would have to spell out.

        In the paper's schedule a table starts as the rest of the model does: what the table's own
        initialiser drew stays, unless it is N(0, 1), nn.Embedding's, from which codes hardly learn.
        """
        scale = self.start_scale(half_scale(parameters["query"]), tied)
        for parameter in (parameters[name] for name in self.drawn):
            if not c.by_paper:
                parameter.normal_(0, scale)
            elif not parameter.is_meta and parameter.float().std(unbiased=False) > 0.5:
                parameter.mul_(scale)

    def start_scale(self, half: float, tied: bool) -> float:
        """Deviation of the start, where half that of the table's own initialiser is `half`. A table
        that would start smaller by itself does so here too, and a tied one starts larger: an output
        layer is slow to learn from rows near 0."""
        return half if tied else min(START, half)

    def trackers(self, c: KO, shapes: Shapes) -> list[Tracker]:
        groups, K, _ = shapes["values"]
        out: list[Tracker] = []
        if c.warmup_updates:
            out.append(WarmUp(c.warmup_updates, c.ramp_updates or 0))
        out.append(
            RunningStatistics("norm", (groups, K)) if c.by_paper else self.average(c, shapes)
        )
        if c.reseed_after:
            out.append(IdleCodes(groups, K, c.reseed_after, self.reseed))
        return out

    def average(self, c: KO, shapes: Shapes) -> Tracker:
        """What keys follow where no gradient moves them."""
        raise NotImplementedError

    def reseed(self, book: Codebook, dead: Tensor, query: Tensor, codes: Tensor) -> None:
        """Put dead codes (G, K) on queries (rows, D, key size) of tokens that were just seen."""
        raise NotImplementedError

    def by_group(self, rows: Tensor, c: KO) -> Tensor:
        """Query rows in float32: (tokens, D, key size)."""
        return rows.float().view(rows.shape[0], c.D, rows.shape[1] // c.D)

    def trains_on_eval_codes(self, c: KO) -> bool:
        return not c.by_paper

    def train(self, rows: Tensor, book: Codebook, c: KO) -> TrainOutput:
        if c.by_paper:
            q, keys = self.by_group(rows, c), book.keys.float()
            batch = batch_statistics(q, keys.clone(), self.distance(c))
            # A single row has no spread; the running statistics serve.
            book = book if batch is None else replace(book, stats=batch)
        codes = self.codes(rows, book, c)
        out = self.rebuild(rows, codes, book, c)
        seen = self.observe(rows, codes, book, c)
        if c.by_paper and batch is not None:
            seen = seen._replace(moments={"norm": batch.detach()})
        return seen._replace(rows=out)

    def observe(self, rows: Tensor, codes: Tensor, book: Codebook, c: KO) -> TrainOutput:
        q = self.by_group(rows, c)
        regularizer = self.regularizer(q, codes, book, c)
        return TrainOutput(rows, q.detach(), codes, regularizer=regularizer)

    def regularizer(
        self, q: Tensor, codes: Tensor, book: Codebook, c: KO
    ) -> RegularizerTerm | None:
        """The term of queries (tokens, D, size) with these codes."""
        return None

    def codes(self, rows: Tensor, book: Codebook, c: KO) -> Tensor:
        q = self.by_group(rows.detach(), c)
        stats = None if book.stats is None else book.stats.detach()
        return evaluation_codes(q, book.keys.detach(), self.distance(c), stats)

    @torch.no_grad()
    def start_from_plain(self, book: Codebook, c: KO, trained: Trained) -> None:
        groups, K, _ = book.values.shape
        book.values.copy_(cluster_table(trained, groups, K, c.D))
        book.keys.copy_(book.values)

    def start_from_table(self, book: Codebook, c: KO, trained: Trained) -> None:
        if c.by_paper:
            raise ValueError(
                "schedule paper starts at random; use schedule warmup to start from a full table"
            )
        book.query.copy_(trained.table)
        self.start_from_plain(book, c, trained)
