"""Language modelling by truncated back-propagation: `--task stateful_lm`.
The corpus is split into --batch-size lanes per worker; each batch continues the previous one. Every
token of the corpus is the target of exactly one step of exactly one lane."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

import logging
import math
import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset, data_utils, iterators
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import FairseqTask, register_task
from omegaconf import MISSING
from torch import Tensor

logger = logging.getLogger(__name__)


class TokenStream(FairseqDataset):
    """A split as one sequence of N tokens, with `eos` at the end of each line."""

    def __init__(self, tokens: Tensor, split: str, pad: int, eos: int) -> None:
        super().__init__()
        self.tokens = tokens  # (N,)
        self.split, self.pad, self.eos = split, pad, eos

    def __len__(self) -> int:
        return self.tokens.numel()


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
        self.pad, self.steps = stream.pad, steps
        self.lanes, self.total_lanes = lanes, total
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

    def __getitem__(self, index: int) -> Dict[str, Any]:
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

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
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

    def state_dict(self) -> Dict[str, Any]:
        place = super().state_dict()
        place["total_lanes"] = self.lanes.total_lanes
        place["steps"] = self.lanes.steps
        state = self.task.carried
        # At the end of an epoch the next one starts from zeros; a state from another segment
        # (left over after an overflow with several workers) would be worse than none.
        if state is not None and state[0] == place["iterations_in_epoch"] - 1:
            place["hidden_state"] = state[1].float().cpu()
        return place

    def load_state_dict(self, place: Dict[str, Any]) -> None:
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


@dataclass
class StatefulLanguageModelingConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "path to data directory"})
    tokens_per_sample: int = field(
        default=35, metadata={"help": "steps of back-propagation: tokens of each lane in a batch"}
    )


@register_task("stateful_lm", dataclass=StatefulLanguageModelingConfig)
class StatefulLanguageModelingTask(FairseqTask):
    """Train and evaluate a language model whose hidden state is carried over the corpus.

    - State is zero at the start of an epoch and of each evaluation, detached between segments,
      and saved with the position in the epoch: that of the lanes of all workers.
    - The gradient is that of the loss summed over the steps of a segment and averaged over the
      lanes, which gives `--lr` and `--clip-norm` the meaning they have in Zaremba et al. (2014).
    - The logged loss and perplexity are per token. Every token counts once, end-of-line too.
    """

    def __init__(self, cfg: StatefulLanguageModelingConfig, **kwargs: Any) -> None:
        super().__init__(cfg, **kwargs)
        if cfg.tokens_per_sample < 1:
            raise ValueError(
                f"--tokens-per-sample {cfg.tokens_per_sample} is not positive; 20 or 35 is usual "
                "(fairseq-eval-lm subtracts --context-window from it: leave that out)"
            )
        self._paths: List[str] = utils.split_paths(cfg.data)
        self.dictionary = Dictionary.load(os.path.join(self._paths[0], "dict.txt"))
        logger.info("dictionary: %d types", len(self.dictionary))
        self._model: Optional[Any] = None
        # A segment and the state at its end: of the lanes of all workers after the last batch; of
        # this worker's lanes in the checkpoint that the next epoch goes on from.
        self.carried: Optional[Tuple[int, Tensor]] = None
        self.restored: Optional[Tuple[int, Tensor]] = None

    source_dictionary = target_dictionary = property(lambda self: self.dictionary)

    def load_dataset(
        self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any
    ) -> None:
        """Load a split as one stream. Several data directories are shards of the training set,
        one per epoch in turn."""
        shard = (epoch - 1) % len(self._paths) if split.startswith("train") else 0
        path = self._paths[shard]
        lines = data_utils.load_indexed_dataset(
            os.path.join(path, split), self.dictionary, combine=combine
        )
        if lines is None:
            raise FileNotFoundError(f"no binarised {split} split in {path}; run fairseq-preprocess")
        tokens = [lines[i].int() for i in range(len(lines))]
        stream = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int)
        logger.info("%s: %s tokens, end-of-line counted", split, f"{len(stream):,}")
        self.datasets[split] = TokenStream(
            stream, split, self.dictionary.pad(), self.dictionary.eos()
        )

    def get_batch_iterator(  # type: ignore[override]
        self,
        dataset: TokenStream,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        **unused: Any,
    ) -> LaneIterator:
        """`max_sentences` is --batch-size: lanes per worker. Evaluation without one takes one."""
        if max_sentences is None and dataset.split.startswith("train"):
            raise ValueError(
                "--batch-size is not given: --task stateful_lm splits the corpus into that many "
                "lanes per worker and cannot use --max-tokens; the paper's is 20"
            )
        lanes = LaneDataset(
            dataset, max_sentences or 1, self.cfg.tokens_per_sample, num_shards, shard_id
        )
        # The iterator must not shard: this worker's lanes are all in *lanes*.
        return LaneIterator(
            lanes, self, num_workers=num_workers, epoch=epoch, buffer_size=data_buffer_size
        )

    def eval_lm_dataloader(
        self,
        dataset: TokenStream,
        max_tokens: Optional[int] = None,
        batch_size: Optional[int] = None,
        context_window: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Segments for fairseq-eval-lm; one lane unless --batch-size is given."""
        if context_window > 0:
            raise ValueError(
                f"--context-window {context_window}: --task stateful_lm carries the whole past; "
                "leave it out"
            )
        if kwargs.get("num_shards", 1) > 1:
            raise ValueError(
                f"{kwargs['num_shards']} workers would each score a part of the split, and only "
                "the first one's figure is printed; pass --distributed-world-size 1"
            )
        iterator = self.get_batch_iterator(dataset, max_sentences=batch_size or 1, **kwargs)
        return iterator.next_epoch_itr(shuffle=False)

    def build_model(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        model = super().build_model(cfg, *args, **kwargs)
        if not getattr(model, "carries_state", False):
            raise ValueError(
                f"{type(model).__name__} does not carry hidden state; with --task stateful_lm use "
                "--arch zaremba_lstm_lm_small, _medium or _large"
            )
        return model

    def build_criterion(self, cfg: Any, *args: Any, **kwargs: Any) -> FairseqCriterion:
        """Make the criterion's `sample_size` the number of lanes."""
        criterion = super().build_criterion(cfg, *args, **kwargs)
        if not hasattr(criterion, "sentence_avg"):
            raise ValueError(
                f"{type(criterion).__name__} cannot average over lanes (it has no --sentence-avg); "
                "with --task stateful_lm use --criterion cross_entropy"
            )
        criterion.sentence_avg = True
        return criterion

    def reduce_metrics(
        self, logging_outputs: List[Dict[str, Any]], criterion: FairseqCriterion
    ) -> None:
        """Log per token although the gradient is per lane."""
        per_token = [
            {**log, "sample_size": log["ntokens"]} if "ntokens" in log else log
            for log in logging_outputs
        ]
        super().reduce_metrics(per_token, criterion)

    def begin_epoch(self, epoch: int, model: Any) -> None:
        super().begin_epoch(epoch, model)
        self._model = model
        # From zeros, except in the epoch that a checkpoint interrupted.
        model.decoder.set_carried_state(self.restored)
        self.carried = self.restored = None

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        out = super().train_step(*args, **kwargs)
        if self._model is not None:
            self.carried = self._model.decoder.carried_state()
        # Only the first worker writes checkpoints, and it may do so at any time, even after a batch
        # that overflowed. So it needs the others' lanes at any time. Compared with the gradients
        # this tensor is small.
        if self.carried is not None and distributed_utils.get_data_parallel_world_size() > 1:
            segment, state = self.carried
            group = distributed_utils.get_data_parallel_group()
            shares = distributed_utils.all_gather(state.float().contiguous(), group=group)
            self.carried = (segment, torch.cat(list(shares), dim=1))
        return out
