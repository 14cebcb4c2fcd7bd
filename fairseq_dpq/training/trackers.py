"""What a table follows during training: the schedule, statistics of responses, keys that follow
their queries, idle codes. Each tracker collects sums over the micro-batches of one update; the sums
of all workers are added up before they are applied, so that all hold the same numbers.

No tracker waits for the device: what decides about Python's way through the code is a Python number
beside the buffer that checkpoints keep (re-seeding is the exception, where it is asked for).
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_dpq.training.codebook import Codebook, TrainOutput
from fairseq_dpq.training.codes import sum_by_code
from fairseq_dpq.training.distances import wide_dtype

_RATE = 0.01  # of a new batch in the running statistics, once 100 batches have been averaged
_SAMPLE = 1024  # queries kept as seeds for codes that nobody uses

Shapes = Dict[str, Tuple[int, ...]]


class Tracker:
    """Sums of one kind, and the buffers of the table that they are applied to."""

    always = False  # whether it also goes on while the table is plain, or frozen
    evaluated: tuple[str, ...] = ()  # buffers that evaluation reads too
    skipped: Tensor | None = None  # sums that were left out because they were not finite
    collected: Sequence[Tensor] = ()  # the sums since the last update; none without a batch

    def buffers(self) -> Shapes:
        """Shapes of the buffers by name."""
        raise NotImplementedError

    def reset(self, book: Codebook, started: bool = False) -> None:
        """Initial values; `started` if a trained table has just set codebook and statistics."""
        for name in self.buffers():
            book.tensors[name].zero_()

    def adopt(self, saved: dict[str, Tensor], book: Codebook) -> None:
        """Put into `saved`, the tensors of a checkpoint, the buffers that it lacks. `book` has its
        parameters and buffers to write to."""
        if not set(self.buffers()) <= set(saved):
            self.reset(book)
            saved.update({name: book.tensors[name] for name in self.buffers()})

    def sum_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of what is added up over micro-batches and workers."""
        return list(self.buffers().values())

    def measure(self, out: TrainOutput, tokens: Tensor) -> Sequence[Tensor]:
        """These sums of one micro-batch; nothing if it has none."""
        return ()

    def clear(self) -> None:
        """Forget what was collected."""
        self.collected = ()

    def apply(self, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        """Move the buffers; the codes (G, K), bool, whose key or value was set, if any."""
        raise NotImplementedError

    def on_codes_reset(self, book: Codebook, codes: Tensor) -> None:
        """Another tracker, or a start, set the keys or values of these codes (G, K)."""

    def _skip(self, bad: Tensor) -> None:
        self.skipped = bad.sum() if self.skipped is None else self.skipped + bad.sum()


class TrackerSet(List[Tracker]):
    """All that one table follows."""

    def counts(self, buffers: Mapping[str, Any]) -> tuple[int, int, int]:
        """Updates so far, last of the warm-up, last of the ramp; all 0 without a warm-up."""
        warmup = next((t for t in self if isinstance(t, WarmUp)), None)
        return (0, 0, 0) if warmup is None else warmup.counts(buffers["schedule"])

    def reset(self, book: Codebook, started: bool) -> None:
        """Initial values of all buffers."""
        for tracker in self:
            tracker.clear()
            tracker.reset(book, started)

    @torch.no_grad()
    def collect(self, out: TrainOutput, tokens: Tensor) -> None:
        """Take in one micro-batch."""
        for tracker in self:
            more = tracker.measure(out, tokens)
            if tracker.collected and more:
                more = [total + part for total, part in zip(tracker.collected, more)]
            tracker.collected = more or tracker.collected

    def skipped(self) -> int:
        """Sums that were left out since the last call because they were not finite."""
        found = [t.skipped for t in self if t.skipped is not None]
        for tracker in self:
            tracker.skipped = None
        return int(torch.stack(found).sum()) if found else 0

    @torch.no_grad()
    def apply(self, book: Codebook, held: bool) -> bool:
        """Add up over the workers and apply, all but the schedule unless `held`; True if keys or
        values were set."""
        moving = [tracker for tracker in self if tracker.always or not held]
        # The same shapes on each worker, also without a batch
        how: Any = {"dtype": wide_dtype(book.query.device), "device": book.query.device}
        parts = [t.collected or [torch.zeros(s, **how) for s in t.sum_shapes()] for t in moving]
        summed = iter(_sum_over_workers([part for some in parts for part in some]))
        changed = False
        for tracker, own in zip(moving, parts):
            codes = tracker.apply(book, [next(summed) for _ in own])
            tracker.clear()
            if codes is not None:
                changed = True
                self.codes_were_reset(book, codes)
        return changed

    @torch.no_grad()
    def codes_were_reset(self, book: Codebook, codes: Tensor) -> None:
        """The keys or values of these codes (G, K) have been set: all workers take the first one's,
        but for the queries, which are large, and stay as they are."""
        for tracker in self:
            tracker.on_codes_reset(book, codes)
        for name, tensor in book.tensors.items() if workers() > 1 else ():
            if name != "query":
                dist.broadcast(tensor.data, 0)

    def __copy__(self) -> TrackerSet:
        """For a copy of the layer: without what belongs to one batch."""
        other = TrackerSet(copy.copy(tracker) for tracker in self)
        for tracker in other:
            tracker.clear()
        return other


class WarmUp(Tracker):
    """Counts updates: first the table is plain, then quantised rows take over along a ramp.

    The counts are a buffer, so that a resumed training goes on at the same place; a longer
    training than was planned does not stretch them.
    """

    always = True
    evaluated = ("schedule",)

    def __init__(self, plain: int, ramp: int) -> None:
        self._plan = self._counts = (0, plain, plain + ramp)
        self._seen: Any = None

    def buffers(self) -> Shapes:
        return {"schedule": (3,)}  # updates so far, last of the warm-up, last of the ramp

    def sum_shapes(self) -> list[tuple[int, ...]]:
        return []

    def counts(self, schedule: Tensor) -> tuple[int, int, int]:
        """The buffer as Python numbers; it is read again only after somebody has written to it."""
        if not schedule.is_meta and (self._seen is None or self._seen != _version(schedule)):
            now, plain, last = (int(x) for x in schedule.tolist())
            self._seen, self._counts = _version(schedule), (now, plain, last)
        return self._counts

    def reset(self, book: Codebook, started: bool = False) -> None:
        """Begin the schedule, or the ramp where a trained table made the warm-up needless."""
        _, plain, last = self._plan
        start = [plain if started else 0.0, plain, last]
        book.tensors["schedule"].copy_(torch.tensor(start))

    def adopt(self, saved: dict[str, Tensor], book: Codebook) -> None:
        """A table that is still plain in the checkpoint follows the schedule of this training. One
        that has its codes keeps its own."""
        own, old = book.tensors["schedule"], saved.get("schedule")
        if old is None:
            _, plain, last = self.counts(own)
            saved["schedule"] = own.new_tensor([last, plain, last])
        elif is_plain(old) and old[1:].tolist() != own[1:].tolist():
            saved["schedule"] = own.clone()

    def apply(self, book: Codebook, sums: Sequence[Tensor]) -> None:
        schedule = book.tensors["schedule"]
        now, plain, last = self.counts(schedule)
        schedule[0].add_(1)
        self._seen, self._counts = _version(schedule), (now + 1, plain, last)


def _version(tensor: Tensor) -> tuple[int, int] | None:
    """What changes with each write; None where nothing tells."""
    return None if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def is_plain(schedule: Tensor | None) -> bool:
    """Whether a checkpoint's buffer `schedule` says that rows are still the queries themselves."""
    return schedule is not None and schedule.numel() == 3 and bool(schedule[0] < schedule[1])


class RunningStatistics(Tracker):
    """Running mean and variance of a batch norm, by which evaluation normalises; `norm` is that of
    the responses."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self.evaluated = f"{name}_mean", f"{name}_var"

    def buffers(self) -> Shapes:
        name = self.name
        return {f"{name}_mean": self.shape, f"{name}_var": self.shape, f"{name}_updates": ()}

    def adopt(self, saved: dict[str, Tensor], book: Codebook) -> None:
        """Codes depend on them: a checkpoint without them cannot be loaded."""

    def reset(self, book: Codebook, started: bool = False) -> None:
        if started:  # with the statistics of the whole vocabulary
            book.tensors[f"{self.name}_updates"].fill_(1)
            return
        super().reset(book)
        book.tensors[f"{self.name}_var"].fill_(1)

    def measure(self, out: TrainOutput, tokens: Tensor) -> Sequence[Tensor]:
        stats = out.moments.get(self.name)
        if stats is None:  # too few to tell
            return ()
        count = tokens.numel()
        mean, var = wide(stats.mean), wide(stats.var)
        return mean * count, (var + mean * mean) * count, mean.new_full((), count)

    def apply(self, book: Codebook, sums: Sequence[Tensor]) -> None:
        total, square, count = sums
        finite = torch.isfinite(total).all() & torch.isfinite(square).all()
        some = (count > 0) & finite
        self._skip(~finite)
        mean = total / count.clamp_min(1)
        var = (square / count.clamp_min(1) - mean * mean).clamp_min(0)
        running_mean, running_var, updates = (book.tensors[name] for name in self.buffers())
        updates += some.float()
        # A plain average at first, so that the initial 0 and 1 leave no trace; the first exactly,
        # whatever each worker had before.
        first = some & (updates == 1)
        step = (1 / wide(updates).clamp_min(1)).clamp_min(_RATE)
        for running, new in ((running_mean, mean), (running_var, var)):
            moved = running + (step * (new - running)).float()
            moved = torch.where(first, new.float(), moved)
            running.copy_(torch.where(some, moved, running))


class KeyAverage(Tracker):
    """Keys as the moving average of the queries that they stand for.

    Where values are apart from the keys, they do the same along the ramp, and learn by their own
    gradient after it. On the ramp, rows are mostly plain, so that queries learn fast; the gradient
    that the share of the quantised row leaves to the values would not keep up. Keys that an
    optimiser moves change the codes of many words at once, at a constant rate all through the
    training.
    """

    def __init__(self, shape: tuple[int, ...], decay: float) -> None:
        """`shape` (G, K, size) is that of the keys."""
        self.shape, self.decay = shape, decay

    def buffers(self) -> Shapes:
        return {"ema_count": self.shape[:2], "ema_sum": self.shape}

    def reset(self, book: Codebook, started: bool = False) -> None:
        book.tensors["ema_count"].fill_(1)
        book.tensors["ema_sum"].copy_(book.keys)

    def measure(self, out: TrainOutput, tokens: Tensor) -> Sequence[Tensor]:
        """Tokens of each code, and their queries."""
        assert out.query is not None and out.codes is not None
        G, K, _ = self.shape
        return count(out.codes, G, K), wide(sum_by_code(out.query, out.codes, G, K))

    def apply(self, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        used, total = (part.float() for part in sums)
        finite = torch.isfinite(total * total).all(-1)  # distances are squares
        self._skip(~finite)
        used, total = used * finite, total.masked_fill(~finite.unsqueeze(-1), 0)
        ema_count, ema_sum = book.tensors["ema_count"], book.tensors["ema_sum"]
        ema_count.mul_(self.decay).add_(used, alpha=1 - self.decay)
        ema_sum.mul_(self.decay).add_(total, alpha=1 - self.decay)
        moved = ema_sum / ema_count.clamp_min(1e-12).unsqueeze(-1)
        hit = (used > 0).unsqueeze(-1)
        book.keys.copy_(torch.where(hit, moved, book.keys.float()))
        if book.ramp_left < 1 or book.keys is book.values:
            return None
        book.values.copy_(book.keys)
        # From now on the optimiser moves the values, and must not go back to copies of its own.
        return torch.ones_like(ema_count, dtype=torch.bool) if book.ramp_left == 1 else None

    def on_codes_reset(self, book: Codebook, codes: Tensor) -> None:
        ema_sum = book.tensors["ema_sum"]
        ema_sum.copy_(torch.where(codes.unsqueeze(-1), book.keys.float(), ema_sum))
        book.tensors["ema_count"].masked_fill_(codes, 1)


class IdleCodes(Tracker):
    """Re-seeds codes that no token has used for a while with queries of tokens just seen."""

    def __init__(self, shape: tuple[int, ...], limit: int) -> None:
        """`shape` is (G, K)."""
        self.shape, self.limit = shape, limit
        self.clear()

    def buffers(self) -> Shapes:
        return {"idle": self.shape}

    def clear(self) -> None:
        super().clear()
        self.seeds: tuple[Tensor, Tensor] | None = None  # queries (rows, D, key size), their codes

    def sum_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape, (1,)]

    def measure(self, out: TrainOutput, tokens: Tensor) -> Sequence[Tensor]:
        assert out.query is not None and out.codes is not None
        used, some = count(out.codes, *self.shape), len(out.query) > 0
        if some:
            self.seeds = out.query[:_SAMPLE].clone(), out.codes[:_SAMPLE].clone()
        # The first worker sets the codes. One without tokens has nothing to set them to.
        return used, used.new_full((1,), some and (workers() == 1 or dist.get_rank() == 0))

    def apply(self, book: Codebook, sums: Sequence[Tensor]) -> Tensor | None:
        idle = book.tensors["idle"]
        idle.add_(1).masked_fill_(sums[0] > 0, 0)
        dead = (idle >= self.limit) & (sums[1] > 0)
        if not bool(dead.any()):
            return None
        if self.seeds is not None:
            query, codes = self.seeds
            finite = torch.isfinite(query).all(-1).all(-1)
            if bool(finite.any()):
                self._reseed(book, dead, query[finite], codes[finite])
        idle.masked_fill_(dead, 0)
        return dead

    def _reseed(self, book: Codebook, dead: Tensor, query: Tensor, codes: Tensor) -> None:
        """Put the keys of dead codes (G, K) on random queries (rows, D, key size)."""
        group, code = dead.nonzero(as_tuple=True)
        row = torch.randint(query.shape[0], (group.numel(),), device=query.device)
        source = group
        if self.shape[0] == 1:
            source = torch.randint(query.shape[1], (group.numel(),), device=query.device)
        book.keys[group, code] = query[row, source].to(book.keys.dtype)
        if book.values is not book.keys:
            # The value of the token's present code: its embedding does not jump when it changes.
            book.values[group, code] = book.values[group, codes[row, source]]


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


def _sum_over_workers(parts: list[Tensor]) -> list[Tensor]:
    if workers() == 1 or not parts:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    return [f.view_as(p) for f, p in zip(flat.split([p.numel() for p in parts]), parts)]
