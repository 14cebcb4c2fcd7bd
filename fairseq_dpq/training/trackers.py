"""What a table follows during training: the schedule, statistics of responses, centroids that
follow their queries, idle codes. Each tracker collects sums over the micro-batches of one update;
the sums of all workers are added up before they are applied, so that all hold the same numbers.

No tracker waits for the device: what decides about Python's way through the code is a Python number
beside the buffer that checkpoints keep (re-seeding is the exception, where it is asked for).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_dpq.training.codebook import Codebook, TrainOutput
from fairseq_dpq.training.codes import sum_by_code
from fairseq_dpq.training.distances import wide_dtype

_RATE = 0.01  # of a new batch in the running statistics, once 100 batches have been averaged
_SAMPLE = 1024  # queries kept as seeds for codes that nobody uses

Buffers = Mapping[str, Tensor]
Shapes = Dict[str, Tuple[int, ...]]


class Tracker:
    """Sums of one kind, and the buffers that they are applied to."""

    skipped: Tensor | None = None  # sums that were left out because they were not finite
    collected: Sequence[Tensor] = ()  # the sums since the last update; none without a batch

    def buffers(self) -> Shapes:
        """Shapes of the buffers by name."""
        raise NotImplementedError

    def evaluation_buffers(self) -> tuple[str, ...]:
        """Those that evaluation reads too."""
        return ()

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        """Initial values; `started` if a trained table has just set codebook and statistics."""
        for name in self.buffers():
            state[name].zero_()

    def adopt(self, saved: dict[str, Tensor], state: Buffers, book: Codebook) -> None:
        """Put into `saved`, the buffers of a checkpoint, those that it lacks: `state` as `reset`
        sets it for the checkpoint's own `book`."""
        if not set(self.buffers()) <= set(saved):
            self.reset(state, book)
            saved.update({name: state[name] for name in self.buffers()})

    def sum_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of what is added up over micro-batches and workers."""
        return []

    def measure(self, out: TrainOutput, tokens: Tensor) -> Sequence[Tensor]:
        """These sums of one micro-batch; nothing if it has none."""
        return ()

    def clear(self) -> None:
        """Forget what was collected."""
        self.collected = ()

    def collect(self, out: TrainOutput, tokens: Tensor) -> None:
        """Take in one micro-batch."""
        more = self.measure(out, tokens)
        if self.collected and more:
            more = [total + part for total, part in zip(self.collected, more)]
        self.collected = more or self.collected

    def sums(self, book: Codebook) -> Sequence[Tensor]:
        """What was collected: the same shapes on each worker, also without a batch."""
        wide, device = wide_dtype(book.query.device), book.query.device
        return self.collected or [
            torch.zeros(shape, dtype=wide, device=device) for shape in self.sum_shapes()
        ]

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        """Move the buffers; the codes (G, K), bool, whose key or value was set, if any."""
        raise NotImplementedError

    def on_codes_reset(self, state: Buffers, book: Codebook, codes: Tensor) -> None:
        """Another tracker, or a start, set the keys or values of these codes (G, K)."""

    def _skip(self, bad: Tensor) -> None:
        self.skipped = bad.sum() if self.skipped is None else self.skipped + bad.sum()


class WarmUp(Tracker):
    """Counts updates: first the table is plain, then quantised rows take over along a ramp.

    The counts are a buffer, so that a resumed training goes on at the same place; a longer
    training than was planned does not stretch them.
    """

    def __init__(self, plain: int, ramp: int) -> None:
        self._plan = self._counts = (0, plain, plain + ramp)
        self._seen: Any = None

    def buffers(self) -> Shapes:
        return {"schedule": (3,)}  # updates so far, last of the warm-up, last of the ramp

    def evaluation_buffers(self) -> tuple[str, ...]:
        return ("schedule",)

    def counts(self, state: Buffers) -> tuple[int, int, int]:
        """The buffer as Python numbers; it is read again only after somebody has written to it."""
        buffer = state["schedule"]
        if buffer.is_meta:
            return self._counts
        seen = None if buffer.is_inference() else (buffer.data_ptr(), buffer._version)
        if seen is None or seen != self._seen:
            now, plain, last = (int(x) for x in buffer.tolist())
            self._seen, self._counts = seen, (now, plain, last)
        return self._counts

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        """Begin the schedule, or the ramp where a trained table made the warm-up needless."""
        _, plain, last = self._plan
        state["schedule"].copy_(torch.tensor([plain if started else 0.0, plain, last]))

    def adopt(self, saved: dict[str, Tensor], state: Buffers, book: Codebook) -> None:
        """A table that is still plain in the checkpoint follows the schedule of this training. One
        that has its codes keeps its own."""
        own, old = state["schedule"], saved.get("schedule")
        if old is None:
            _, plain, last = self.counts(state)
            saved["schedule"] = own.new_tensor([last, plain, last])
        elif is_plain(old) and old[1:].tolist() != own[1:].tolist():
            saved["schedule"] = own.clone()

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> None:
        now, plain, last = self.counts(state)
        buffer = state["schedule"]
        buffer[0].add_(1)
        self._counts = (now + 1, plain, last)
        self._seen = None if buffer.is_inference() else (buffer.data_ptr(), buffer._version)


def is_plain(schedule: Tensor | None) -> bool:
    """Whether a checkpoint's buffer `schedule` says that rows are still the queries themselves."""
    return schedule is not None and schedule.numel() == 3 and bool(schedule[0] < schedule[1])


class RunningStatistics(Tracker):
    """Running mean and variance of a batch norm, by which evaluation normalises; `norm` is that of
    the responses."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape

    def buffers(self) -> Shapes:
        name = self.name
        return {f"{name}_mean": self.shape, f"{name}_var": self.shape, f"{name}_updates": ()}

    def evaluation_buffers(self) -> tuple[str, ...]:
        return f"{self.name}_mean", f"{self.name}_var"

    def adopt(self, saved: dict[str, Tensor], state: Buffers, book: Codebook) -> None:
        """Codes depend on them: a checkpoint without them cannot be loaded."""

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        if started:  # with the statistics of the whole vocabulary
            state[f"{self.name}_updates"].fill_(1)
            return
        super().reset(state, book)
        state[f"{self.name}_var"].fill_(1)

    def sum_shapes(self) -> list[tuple[int, ...]]:
        return [(1,), self.shape, self.shape]

    def measure(self, out: TrainOutput, tokens: Tensor) -> Sequence[Tensor]:
        stats = out.moments.get(self.name)
        if stats is None:  # too few to tell
            return ()
        count = tokens.numel()
        mean, var = wide(stats.mean), wide(stats.var)
        return mean.new_full((1,), count), mean * count, (var + mean * mean) * count

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> None:
        count, total, square = sums
        finite = torch.isfinite(total).all() & torch.isfinite(square).all()
        some = (count > 0) & finite
        self._skip(~finite)
        mean = total / count.clamp_min(1)
        var = (square / count.clamp_min(1) - mean * mean).clamp_min(0)
        running_mean, running_var, updates = (state[name] for name in self.buffers())
        updates += some.float().view(())
        # A plain average at first, so that the initial 0 and 1 leave no trace; the first exactly,
        # whatever each worker had before.
        first = some & (updates == 1)
        step = (1 / wide(updates).clamp_min(1)).clamp_min(_RATE)
        for running, new in ((running_mean, mean), (running_var, var)):
            moved = running + (step * (new - running)).float()
            moved = torch.where(first, new.float(), moved)
            running.copy_(torch.where(some, moved, running))


class CentroidAverage(Tracker):
    """Keys as the moving average of the queries that they stand for; those of VQ are its values."""

    def __init__(self, groups: int, K: int, size: int, decay: float) -> None:
        self.shape, self.decay = (groups, K, size), decay

    def buffers(self) -> Shapes:
        return {"ema_count": self.shape[:2], "ema_sum": self.shape}

    def reset(self, state: Buffers, book: Codebook, started: bool = False) -> None:
        state["ema_count"].fill_(1)
        state["ema_sum"].copy_(book.keys)

    def sum_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape[:2], self.shape]

    def measure(self, out: TrainOutput, tokens: Tensor) -> Sequence[Tensor]:
        """Tokens of each code, and their queries."""
        assert out.query is not None and out.codes is not None
        G, K, _ = self.shape
        return count(out.codes, G, K), wide(sum_by_code(out.query, out.codes, G, K))

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        used, total = (part.float() for part in sums)
        finite = torch.isfinite(total * total).all(-1)  # distances are squares
        self._skip(~finite)
        used, total = used * finite, total.masked_fill(~finite.unsqueeze(-1), 0)
        state["ema_count"].mul_(self.decay).add_(used, alpha=1 - self.decay)
        state["ema_sum"].mul_(self.decay).add_(total, alpha=1 - self.decay)
        moved = state["ema_sum"] / state["ema_count"].clamp_min(1e-12).unsqueeze(-1)
        hit = (used > 0).unsqueeze(-1)
        book.keys.copy_(torch.where(hit, moved, book.keys.float()))
        return None

    def on_codes_reset(self, state: Buffers, book: Codebook, codes: Tensor) -> None:
        hit = codes.unsqueeze(-1)
        state["ema_sum"].copy_(torch.where(hit, book.keys.float(), state["ema_sum"]))
        state["ema_count"].masked_fill_(codes, 1)


class KeyAverage(CentroidAverage):
    """SX: keys follow the queries as VQ centroids do, and so do values along the ramp, after which
    they learn by their own gradient.

    On the ramp, rows are mostly plain, so that queries learn fast; the gradient that the share of
    the quantised row leaves to the values would not keep up. Keys that an optimiser moves change
    the codes of many words at once, at a constant rate all through the training.
    """

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        super().apply(state, book, sums)
        if book.ramp_left < 1:
            return None
        book.values.copy_(book.keys)
        # From now on the optimiser moves the values, and must not go back to copies of its own.
        ended = book.ramp_left == 1
        return torch.ones_like(state["ema_count"], dtype=torch.bool) if ended else None


class IdleCodes(Tracker):
    """Re-seeds codes that no token has used for a while with queries of tokens just seen."""

    def __init__(self, groups: int, K: int, limit: int, reseed: Callable[..., None]) -> None:
        """`reseed(book, dead, query, codes)` is the method's."""
        self.shape, self.limit, self.reseed = (groups, K), limit, reseed
        self.clear()

    def buffers(self) -> Shapes:
        return {"idle": self.shape}

    def clear(self) -> None:
        super().clear()
        self.seeds: Tensor | None = None  # (rows, D, key size)
        self.seed_codes: Tensor | None = None

    def sum_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape, (1,)]

    def measure(self, out: TrainOutput, tokens: Tensor) -> Sequence[Tensor]:
        assert out.query is not None and out.codes is not None
        used, some = count(out.codes, *self.shape), len(out.query) > 0
        if some:
            self.seeds = out.query[:_SAMPLE].clone()
            self.seed_codes = out.codes[:_SAMPLE].clone()
        # The first worker sets the codes. One without tokens has nothing to set them to.
        return used, used.new_full((1,), some and _rank() == 0)

    def apply(self, state: Buffers, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        idle = state["idle"]
        idle.add_(1).masked_fill_(sums[0] > 0, 0)
        dead = (idle >= self.limit) & (sums[1] > 0)
        if not bool(dead.any()):
            return None
        if self.seeds is not None and self.seed_codes is not None:
            finite = torch.isfinite(self.seeds).all(-1).all(-1)
            if bool(finite.any()):
                self.reseed(book, dead, self.seeds[finite], self.seed_codes[finite])
        idle.masked_fill_(dead, 0)
        return dead


# Sums ---------------------------------------------------------------------------------------------


def wide(tensor: Tensor) -> Tensor:
    """In the type that long sums are held in."""
    return tensor.to(wide_dtype(tensor.device))


def count(codes: Tensor, G: int, K: int) -> Tensor:
    """Tokens of each code, (G, K)."""
    ones = torch.ones(*codes.shape, 1, device=codes.device)
    return wide(sum_by_code(ones, codes, G, K).squeeze(-1))


def workers() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if workers() > 1 else 0
