"""What a table follows during training: response statistics, EMA centroids, idle codes, the first
tokens. Each tracker collects sums over the micro-batches of one update; the sums of all workers
are added up before they are applied, so that every worker holds the same numbers.
"""

from __future__ import annotations

from typing import Callable, Dict, Mapping, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_dpq import initialization
from fairseq_dpq.codebook import Codebook, Step
from fairseq_dpq.codes import sum_by_code
from fairseq_dpq.normalization import Stats

_RATE = 0.01  # of a new batch in the running statistics, once 100 batches have been averaged
_SAMPLE = 1024  # queries kept as seeds for codes that nobody uses

Buffers = Mapping[str, Tensor]
Shapes = Dict[str, Tuple[int, ...]]


class Tracker:
    """Sums of one kind, and the buffers that they are applied to."""

    def buffers(self) -> Shapes:
        """Shapes of the buffers by name."""
        raise NotImplementedError

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        """Initial values; `started` if a trained table has just set codebook and statistics."""
        for name in self.buffers():
            state[name].zero_()

    def clear(self) -> None:
        """Forget what was collected."""
        raise NotImplementedError

    def collect(self, step: Step, tokens: Tensor, state: Buffers) -> None:
        """Take in one micro-batch."""
        raise NotImplementedError

    def sums(self, state: Buffers, book: Codebook) -> list[Tensor]:
        """What is added up over the workers: the same shapes on each, also without a batch."""
        raise NotImplementedError

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        """Move the buffers; the codes (G, K), bool, whose key or value was set, if any."""
        raise NotImplementedError

    def codes_were_set(self, state: Buffers, book: Codebook, codes: Tensor) -> None:
        """Another tracker, or a start, set the keys or values of these codes (G, K)."""


class WarmUp(Tracker):
    """Counts updates: first the table is plain, then quantised rows take over along a ramp.

    The counts are a buffer, so that a resumed training goes on at the same place; a longer
    training than was planned does not stretch them.
    """

    def __init__(self, plain: int, ramp: int) -> None:
        self.plain, self.ramp = plain, ramp

    def buffers(self) -> Shapes:
        return {"schedule": (3,)}  # updates so far, last of the warm-up, last of the ramp

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        last = self.plain + self.ramp
        counts = [float(self.plain if started else 0), float(self.plain), float(last)]
        state["schedule"].copy_(torch.tensor(counts))

    def clear(self) -> None:
        pass

    def collect(self, step: Step, tokens: Tensor, state: Buffers) -> None:
        pass

    def sums(self, state: Buffers, book: Codebook) -> list[Tensor]:
        return []

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> None:
        state["schedule"][0] += 1

    @staticmethod
    def is_plain(state: Buffers) -> bool:
        """Whether rows are still the queries themselves."""
        return "schedule" in state and bool(state["schedule"][0] < state["schedule"][1])

    @staticmethod
    def has_begun(state: Buffers) -> bool:
        """Whether an update has been counted, or a trained table made the warm-up needless."""
        return bool(state["schedule"][0] > 0)

    @staticmethod
    def at_ramp(state: Buffers) -> bool:
        """Whether the ramp is next."""
        return bool(state["schedule"][0] == state["schedule"][1])

    @staticmethod
    def progress(state: Buffers) -> tuple[int, int]:
        """Updates of the warm-up so far, and all of them."""
        if "schedule" not in state:
            return 0, 0
        now, plain, _ = state["schedule"].tolist()
        return int(min(now, plain)), int(plain)

    @staticmethod
    def quantized_share(state: Buffers) -> float:
        """The weight of the quantised row beside the query: from 0 to 1 over the ramp."""
        if "schedule" not in state:
            return 1.0
        now, first, last = state["schedule"].tolist()
        return 1.0 if now >= last else max(0.0, (now - first) / (last - first))


class RunningStatistics(Tracker):
    """Running mean and variance of a batch norm, by which evaluation normalises."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self.clear()

    def buffers(self) -> Shapes:
        name = self.name
        return {f"{name}_mean": self.shape, f"{name}_var": self.shape, f"{name}_updates": ()}

    def of(self, step: Step) -> Stats | None:
        """Those of one batch."""
        return step.moments.get(self.name)

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        if started:  # with the statistics of the whole vocabulary
            state[f"{self.name}_updates"].fill_(1)
            return
        super().reset(state, book)
        state[f"{self.name}_var"].fill_(1)

    def clear(self) -> None:
        self.count = 0
        self.total: Tensor | None = None
        self.square: Tensor | None = None

    def collect(self, step: Step, tokens: Tensor, state: Buffers) -> None:
        stats = self.of(step)
        if stats is None:
            return
        count = tokens.numel()
        mean, var = stats.mean.double(), stats.var.double()
        self.count += count
        self.total = plus(self.total, mean * count)
        self.square = plus(self.square, (var + mean * mean) * count)

    def sums(self, state: Buffers, book: Codebook) -> list[Tensor]:
        none = zeros(book, *self.shape)
        total = none if self.total is None else self.total
        square = none if self.square is None else self.square
        return [none.new_full((1,), self.count), total, square]

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> None:
        count, total, square = sums
        some = count > 0
        mean = total / count.clamp_min(1)
        var = (square / count.clamp_min(1) - mean * mean).clamp_min(0)
        running_mean, running_var, updates = (state[name] for name in self.buffers())
        updates += some.float().view(())
        # A plain average at first, so that the initial 0 and 1 leave no trace.
        step = (1 / updates.clamp_min(1).double()).clamp_min(_RATE) * some
        if bool(some) and float(updates) == 1:  # exactly, whatever each worker had before
            running_mean.copy_(mean)
            running_var.copy_(var)
            return
        running_mean.add_((step * (mean - running_mean)).float())
        running_var.add_((step * (var - running_var)).float())


class ResponseStatistics(RunningStatistics):
    """Running mean and variance of the responses."""

    def __init__(
        self, groups: int, K: int, measure: Callable[[Codebook], Stats | None] | None = None
    ) -> None:
        super().__init__("norm", (groups, K))
        self.measure = measure  # of keys that were just set

    def of(self, step: Step) -> Stats | None:
        return step.stats

    def codes_were_set(self, state: Buffers, book: Codebook, codes: Tensor) -> None:
        found = self.measure(book) if self.measure else None
        if found is not None:  # those of the old keys would give new ones too many tokens
            for name, new in (("norm_mean", found.mean), ("norm_var", found.var)):
                state[name].copy_(torch.where(codes, new, state[name]))
        if bool(codes.all()):
            state["norm_updates"].zero_()

    @staticmethod
    def running(state: Buffers) -> Stats | None:
        """The running statistics in a layer's buffers; None without normalisation."""
        return Stats(state["norm_mean"], state["norm_var"]) if "norm_mean" in state else None


class FirstTokens(Tracker):
    """Counts the tokens of the first updates, then starts the keys by k-means of their queries."""

    def __init__(self, num_embeddings: int, updates: int, D: int) -> None:
        self.rows, self.updates, self.D = num_embeddings, updates, D
        self.clear()

    def buffers(self) -> Shapes:
        return {"start_counts": (self.rows,), "start_updates": ()}

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        super().reset(state, book)
        if started:
            state["start_updates"].fill_(self.updates)

    def clear(self) -> None:
        self.seen: Tensor | None = None

    def _collecting(self, state: Buffers) -> bool:
        return int(state["start_updates"]) < self.updates

    def collect(self, step: Step, tokens: Tensor, state: Buffers) -> None:
        if self._collecting(state):
            self.seen = plus(self.seen, torch.bincount(tokens.long(), minlength=self.rows))

    def sums(self, state: Buffers, book: Codebook) -> list[Tensor]:
        if not self._collecting(state):
            return []
        return [zeros(book, self.rows) if self.seen is None else self.seen.double()]

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        if not sums:
            return None
        counts = state["start_counts"]
        counts += sums[0].float()
        state["start_updates"].add_(1)
        if self._collecting(state) or not bool(counts.any()):
            return None
        initialization.start_from_queries(book, counts, self.D)
        counts.zero_()
        return torch.ones(book.keys.shape[:2], dtype=torch.bool, device=book.keys.device)


class IdleCodes(Tracker):
    """Re-seeds codes that no token has used for a while with queries of tokens just seen."""

    def __init__(self, groups: int, K: int, limit: int, reseed: Callable[..., None]) -> None:
        """`reseed(book, dead, query, codes)` is the method's."""
        self.shape, self.limit, self.reseed = (groups, K), limit, reseed
        self.clear()

    def buffers(self) -> Shapes:
        return {"idle": self.shape}

    def clear(self) -> None:
        self.used: Tensor | None = None
        self.seeds: Tensor | None = None  # (rows, D, key size)
        self.seed_codes: Tensor | None = None

    def collect(self, step: Step, tokens: Tensor, state: Buffers) -> None:
        assert step.query is not None and step.codes is not None
        self.used = plus(self.used, count(step.codes, *self.shape))
        if step.query.shape[0]:
            self.seeds = step.query[:_SAMPLE].clone()
            self.seed_codes = step.codes[:_SAMPLE].clone()

    def sums(self, state: Buffers, book: Codebook) -> list[Tensor]:
        return [zeros(book, *self.shape) if self.used is None else self.used]

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        idle = state["idle"]
        idle.add_(1).masked_fill_(sums[0] > 0, 0)
        dead = idle >= self.limit
        if not bool(dead.any()):
            return None
        if self.seeds is not None:
            self.reseed(book, dead, self.seeds, self.seed_codes)
        idle.masked_fill_(dead, 0)
        return dead


@torch.no_grad()
def apply_all(trackers: Sequence[Tracker], state: Buffers, book: Codebook) -> bool:
    """Add up over the workers and apply; True if keys or values were set."""
    parts = [tracker.sums(state, book) for tracker in trackers]
    summed = iter(_sum_over_workers([part for some in parts for part in some]))
    changed = False
    for tracker, own in zip(trackers, parts):
        codes = tracker.apply(state, book, [next(summed) for _ in own])
        tracker.clear()
        if codes is not None:
            changed = True
            for other in trackers:
                other.codes_were_set(state, book, codes)
    if changed:
        copy_from_first_worker(state, book)
    return changed


@torch.no_grad()
def all_were_set(trackers: Sequence[Tracker], state: Buffers, book: Codebook) -> None:
    """A start has set all keys and values, and the running statistics to the vocabulary's."""
    codes = torch.ones(book.keys.shape[:2], dtype=torch.bool, device=book.keys.device)
    stats = None if book.stats is None else book.stats.clone()
    for tracker in trackers:
        tracker.clear()
        tracker.codes_were_set(state, book, codes)
    if book.stats is not None and stats is not None:
        book.stats.mean.copy_(stats.mean)
        book.stats.var.copy_(stats.var)
        state["norm_updates"].fill_(1)
    copy_from_first_worker(state, book)


def copy_from_first_worker(state: Buffers, book: Codebook) -> None:
    """Make sure that all workers hold the same, after a start or a new seed."""
    if _workers() > 1:
        # All that a start or a new seed sets. The queries, which are large, stay as they are.
        for tensor in (book.keys, book.values, *state.values()):
            dist.broadcast(tensor.data, 0)


# What trackers of other files use too


def plus(total: Tensor | None, more: Tensor) -> Tensor:
    """A sum that may not have begun."""
    return more if total is None else total + more


def zeros(book: Codebook, *shape: int) -> Tensor:
    """Where sums over tokens begin."""
    return torch.zeros(shape, dtype=torch.float64, device=book.query.device)


def count(codes: Tensor, G: int, K: int) -> Tensor:
    """Tokens of each code, (G, K)."""
    ones = torch.ones(*codes.shape, 1, device=codes.device)
    return sum_by_code(ones, codes, G, K).squeeze(-1).double()


def _workers() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _sum_over_workers(parts: list[Tensor]) -> list[Tensor]:
    if _workers() == 1 or not parts:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    return [f.view_as(p) for f, p in zip(flat.split([p.numel() for p in parts]), parts)]
