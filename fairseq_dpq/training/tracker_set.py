"""All trackers of one table: collecting, adding up over the workers, applying."""

from __future__ import annotations

import copy
from typing import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_dpq.training.codebook import Codebook, TrainOutput
from fairseq_dpq.training.trackers import Buffers, Shapes, Tracker, WarmUp, workers


class TrackerSet:
    """What one table follows. The buffers are the layer's; it passes them to each call."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.all = list(trackers)

    def __iter__(self) -> Iterator[Tracker]:
        return iter(self.all)

    def buffers(self) -> Shapes:
        """Shapes of all buffers by name."""
        return {name: shape for tracker in self for name, shape in tracker.buffers().items()}

    def evaluation_buffers(self) -> list[str]:
        """The buffers that evaluation reads too."""
        return [name for tracker in self for name in tracker.evaluation_buffers()]

    def counts(self, state: Buffers) -> tuple[int, int, int]:
        """Updates so far, last of the warm-up, last of the ramp; all 0 without a warm-up."""
        warmup = next((t for t in self if isinstance(t, WarmUp)), None)
        return (0, 0, 0) if warmup is None else warmup.counts(state)

    def reschedule(
        self, trackers: Sequence[Tracker], state: Buffers, book: Codebook, started: bool
    ) -> None:
        """Take the warm-up of other trackers of the same kinds."""
        for at, tracker in enumerate(trackers):
            if isinstance(tracker, WarmUp):
                self.all[at] = tracker
                tracker.reset(state, book, started)

    def reset(self, state: Buffers, book: Codebook, started: bool) -> None:
        """Initial values of all buffers."""
        for tracker in self:
            tracker.clear()
            tracker.reset(state, book, started)

    def collect(self, out: TrainOutput, tokens: Tensor) -> None:
        """Take in one micro-batch."""
        with torch.no_grad():
            for tracker in self:
                tracker.collect(out, tokens)

    def clear(self) -> None:
        """Forget what was collected."""
        for tracker in self:
            tracker.clear()

    def skipped(self) -> int:
        """Sums that were left out since the last call because they were not finite."""
        found = [t.skipped for t in self if t.skipped is not None]
        for tracker in self:
            tracker.skipped = None
        return int(torch.stack(found).sum()) if found else 0

    @torch.no_grad()
    def apply(self, state: Buffers, book: Codebook, held: bool) -> bool:
        """Add up over the workers and apply, all but the schedule unless `held`; True if keys or
        values were set."""
        moving = [t for t in self if isinstance(t, WarmUp) or not held]
        parts = [tracker.sums(book) for tracker in moving]
        summed = iter(_sum_over_workers([part for some in parts for part in some]))
        changed = False
        for tracker, own in zip(moving, parts):
            codes = tracker.apply(state, book, [next(summed) for _ in own])
            tracker.clear()
            if codes is not None:
                changed = True
                for other in moving:
                    other.on_codes_reset(state, book, codes)
        if changed:
            copy_from_first_worker(state, book)
        return changed

    @torch.no_grad()
    def all_codes_were_reset(self, state: Buffers, book: Codebook) -> None:
        """A start has set all keys and values."""
        codes = torch.ones(book.keys.shape[:2], dtype=torch.bool, device=book.keys.device)
        for tracker in self:
            tracker.on_codes_reset(state, book, codes)
        copy_from_first_worker(state, book)

    def __copy__(self) -> TrackerSet:
        """For a copy of the layer: without what belongs to one batch."""
        other = TrackerSet([copy.copy(tracker) for tracker in self])
        other.clear()
        return other


def copy_from_first_worker(state: Buffers, book: Codebook) -> None:
    """Make sure that all workers hold the same, after a start or a new seed."""
    if workers() > 1:
        # All that a start or a new seed sets. The queries, which are large, stay as they are.
        for tensor in (book.keys, book.values, *state.values()):
            dist.broadcast(tensor.data, 0)


def _sum_over_workers(parts: list[Tensor]) -> list[Tensor]:
    if workers() == 1 or not parts:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    return [f.view_as(p) for f, p in zip(flat.split([p.numel() for p in parts]), parts)]
