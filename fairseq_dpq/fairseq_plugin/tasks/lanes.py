"""A corpus split into lanes: what truncated back-propagation reads, and the position in it.
Every token of the corpus is the target of exactly one step of exactly one lane."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from fairseq.data import FairseqDataset, iterators
from torch import Tensor

logger = logging.getLogger(__name__)


class TokenStream(FairseqDataset):
    """A split as one sequence of N tokens, with `eos` at the end of each line."""

    def __init__(self, tokens: Tensor, split: str, pad: int, eos: int) -> None:
        super().__init__()
        self.tokens = tokens  # (N,)
        self.split = split
        self.pad = pad
        self.eos = eos

    def __len__(self) -> int:
        return self.tokens.numel()

    def __getitem__(self, index: int) -> int:
        return int(self.tokens[index])


class LaneDataset(FairseqDataset):
    """The lanes of one worker; item i is segment i: `steps` tokens of each lane (the last segment
    may be shorter).

    With B lanes over all workers, lane b predicts tokens b*N//B .. (b+1)*N//B - 1, so that lanes
    differ by one token at most. Its first input is the token before them, and `eos` before the
    first token of the corpus, so that N tokens are predicted, not N - B.
    """

    def __init__(
        self, stream: TokenStream, lanes: int, steps: int, num_shards: int = 1, shard_id: int = 0
    ) -> None:
        super().__init__()
        n, total = len(stream), lanes * num_shards
        if n < total:
            raise ValueError(
                f"{stream.split} holds {n} tokens, too few for {total} lanes "
                f"(--batch-size {lanes} on {num_shards} workers); lower --batch-size"
            )
        self.pad = stream.pad
        self.steps = steps
        self.lanes = lanes
        self.total_lanes = total
        self.first_lane = shard_id * lanes
        self.longest = math.ceil(n / total)
        # Column 0 is the token before the lane, the others are its targets.
        self.table = torch.full((lanes, self.longest + 1), stream.pad, dtype=stream.tokens.dtype)
        for row in range(lanes):
            lane = self.first_lane + row
            start, end = lane * n // total, (lane + 1) * n // total
            self.table[row, 0] = stream.tokens[start - 1] if start > 0 else stream.eos
            self.table[row, 1 : end - start + 1] = stream.tokens[start:end]

    def __len__(self) -> int:
        return math.ceil(self.longest / self.steps)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = index * self.steps
        window = self.table[:, start : start + self.steps + 1].long()  # (lanes, steps + 1)
        target = window[:, 1:].contiguous()
        return {
            "id": torch.arange(self.first_lane, self.first_lane + self.lanes),
            "nsentences": self.lanes,
            "ntokens": int(target.ne(self.pad).sum()),
            "net_input": {"src_tokens": window[:, :-1].contiguous(), "segment": index},
            "target": target,
        }

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """An item already is a batch."""
        return samples[0] if samples else {}


class LaneIterator(iterators.EpochBatchIterator):
    """Segments in order. Its position, which checkpoints store, is the segment number *and* the
    hidden state of all workers' lanes. Without the state a resumed run would start from zeros in
    the middle of an epoch.

    That of the training comes from `task.carried`, and goes to `task.restored`.
    """

    def __init__(self, dataset: LaneDataset, task: Any, **kwargs: Any) -> None:
        super().__init__(
            dataset=dataset,
            collate_fn=dataset.collater,
            batch_sampler=[[i] for i in range(len(dataset))],
            disable_shuffling=True,
            **kwargs,
        )
        self.lanes = dataset
        self.task = task

    def state_dict(self) -> dict[str, Any]:
        place = super().state_dict()
        place["total_lanes"] = self.lanes.total_lanes
        place["steps"] = self.lanes.steps
        state = self.task.carried
        # At the end of an epoch the next one starts from zeros; a state from another segment
        # (left over after an overflow with several workers) would be worse than none.
        if state is not None and state[0] == place["iterations_in_epoch"] - 1:
            place["hidden_state"] = state[1].float().cpu()
        return place

    def load_state_dict(self, place: dict[str, Any]) -> None:
        done = place.get("iterations_in_epoch", 0)
        here = (self.lanes.total_lanes, self.lanes.steps)
        saved = (place.get("total_lanes"), place.get("steps"))
        if done > 0 and saved != here:
            logger.warning(
                "the checkpoint stopped in the middle of epoch %s with %s lanes of %s steps; this "
                "run has %d (--batch-size times workers) of %d (--tokens-per-sample) and restarts "
                "that epoch",
                *(place.get("epoch"), *saved, *here),
            )
            place = {**place, "iterations_in_epoch": 0}
        elif done > 0 and "hidden_state" in place:
            first = self.lanes.first_lane
            mine = place["hidden_state"][:, first : first + self.lanes.lanes]
            self.task.restored = (done - 1, mine)
        super().load_state_dict(place)
