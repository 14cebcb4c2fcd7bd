"""The LSTM language model of Zaremba et al. (2014, https://arxiv.org/abs/1409.2329) on nn.LSTM.
Carries its hidden state from one segment of the corpus to the next: see tasks/truncated_bptt_lm."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

import logging
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    FairseqIncrementalDecoder,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from torch import Tensor, nn

logger = logging.getLogger(__name__)

IncrementalState = Dict[str, Dict[str, Optional[Tensor]]]
_RETRIES = 16  # segments that can be repeated: the --update-freq of an update that overflows


@dataclass
class ZarembaLSTMConfig(FairseqDataclass):
    decoder_embed_dim: int = field(default=200, metadata={"help": "embedding size d"})
    decoder_hidden_size: int = field(default=200, metadata={"help": "LSTM units per layer"})
    decoder_layers: int = field(default=2, metadata={"help": "LSTM layers"})
    dropout: float = field(
        default=0.0,
        metadata={"help": "dropout on the embedding, between layers and before the softmax"},
    )
    init_range: float = field(
        default=0.1,
        metadata={"help": "all parameters are initialised uniformly in [-init-range, init-range]"},
    )
    share_decoder_input_output_embed: bool = field(
        default=False, metadata={"help": "tie the softmax weights to the embedding"}
    )


class ZarembaLSTMDecoder(FairseqIncrementalDecoder):
    """Embedding, LSTM layers, softmax.

    Three ways to start the recurrence:

    - `segment=None`: from zeros, nothing is remembered (any fairseq language-modelling task);
    - `segment=i`: segment 0 starts from zeros, segment i from the detached end of segment i-1.
      Training and evaluation keep separate states, so that validation in the middle of an epoch
      does not change the training lanes;
    - `incremental_state`: step-by-step generation.
    """

    def __init__(self, cfg: ZarembaLSTMConfig, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        d, hidden = cfg.decoder_embed_dim, cfg.decoder_hidden_size
        if cfg.share_decoder_input_output_embed and d != hidden:
            raise ValueError(
                f"--share-decoder-input-output-embed needs --decoder-embed-dim {d} equal to "
                f"--decoder-hidden-size {hidden}"
            )
        self.embed_tokens = nn.Embedding(len(dictionary), d, padding_idx=dictionary.pad())
        self.dropout = nn.Dropout(cfg.dropout)
        self.lstm = nn.LSTM(
            d,
            hidden,
            num_layers=cfg.decoder_layers,
            dropout=cfg.dropout if cfg.decoder_layers > 1 else 0.0,
        )
        self.output_projection = nn.Linear(hidden, len(dictionary))
        if cfg.share_decoder_input_output_embed:
            self.output_projection.weight = self.embed_tokens.weight
        for p in self.parameters():
            nn.init.uniform_(p, -cfg.init_range, cfg.init_range)
        nn.init.zeros_(self.embed_tokens.weight[dictionary.pad()])
        # State (2 * layers, lanes, hidden), hidden above cell, at the start of segments, by
        # self.training. Not buffers, because the state of the lanes is saved with the data
        # iterator, whose position it belongs to.
        self._starts: Dict[bool, Dict[int, Tensor]] = {True: {}, False: {}}

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[Any] = None,
        incremental_state: Optional[IncrementalState] = None,
        segment: Optional[int] = None,
        src_lengths: Optional[Any] = None,
    ) -> Tuple[Tensor, Dict[str, Any]]:
        tokens = prev_output_tokens  # (lanes, steps)
        state: Optional[Tensor] = None
        if incremental_state is not None:
            tokens = tokens[:, -1:]
            state = self._cached(incremental_state)
        elif segment is not None:
            state = self._start_of(segment, tokens.size(0))

        x = self.dropout(self.embed_tokens(tokens)).transpose(0, 1)  # (steps, lanes, d)
        x, end = self.lstm(x, None if state is None else state.to(x).chunk(2))
        state = torch.cat(end).detach()
        if incremental_state is not None:
            self._cache(incremental_state, state)
        elif segment is not None:
            self._starts[self.training][segment + 1] = state
            self._starts[self.training].pop(segment - _RETRIES, None)
        x = self.dropout(x).transpose(0, 1)
        return self.output_projection(x), {"attn": None}  # (lanes, steps, n)

    def _start_of(self, segment: int, lanes: int) -> Optional[Tensor]:
        """The state that `segment` starts from; None means zeros. A segment that was seen before is
        a retry (loss scale overflow under --amp, out of memory): what followed it is forgotten."""
        starts = self._starts[self.training]
        starts = {known: state for known, state in starts.items() if 0 < known <= segment}
        self._starts[self.training] = starts
        state = starts.get(segment)
        if segment == 0 or (state is not None and state.size(1) == lanes):
            return state
        logger.warning(
            "no hidden state of %d lanes at the end of segment %d: segment %d starts from zeros",
            *(lanes, segment - 1, segment),
        )
        return None

    def carried_state(self) -> Optional[Tuple[int, Tensor]]:
        """The last training segment, and the state (2 * layers, lanes, hidden) at its end."""
        starts = self._starts[True]
        return (max(starts) - 1, starts[max(starts)]) if starts else None

    def set_carried_state(self, carried: Optional[Tuple[int, Tensor]]) -> None:
        """Train on as if this segment had just ended in this state; without one, from zeros."""
        self._starts[True] = {} if carried is None else {carried[0] + 1: carried[1].detach()}

    def _cached(self, incremental_state: IncrementalState) -> Optional[Tensor]:
        return (self.get_incremental_state(incremental_state, "cached_state") or {}).get("state")

    def _cache(self, incremental_state: IncrementalState, state: Tensor) -> None:
        self.set_incremental_state(incremental_state, "cached_state", {"state": state})

    def reorder_incremental_state(
        self, incremental_state: IncrementalState, new_order: Tensor
    ) -> None:
        """Permute the state as beam search permutes the batch."""
        state = self._cached(incremental_state)
        if state is not None:
            self._cache(incremental_state, state.index_select(1, new_order))


@register_model("zaremba_lstm_lm", dataclass=ZarembaLSTMConfig)
class ZarembaLSTMLanguageModel(FairseqLanguageModel):
    """`--arch zaremba_lstm_lm`. The softmax has a bias; the LSTM has two, as in the original."""

    carries_state = True

    @classmethod
    def build_model(cls, cfg: ZarembaLSTMConfig, task: Any) -> "ZarembaLSTMLanguageModel":
        return cls(ZarembaLSTMDecoder(cfg, task.target_dictionary))


def _register(name: str, size: int, dropout: float, init_range: float) -> None:
    sizes = {"decoder_embed_dim": size, "decoder_hidden_size": size, "decoder_layers": 2}
    defaults = {**sizes, "dropout": dropout, "init_range": init_range}

    @register_model_architecture("zaremba_lstm_lm", f"zaremba_lstm_lm_{name}")
    def architecture(args: Namespace) -> None:
        for key, default in defaults.items():
            setattr(args, key, getattr(args, key, default))


_register("small", 200, 0.0, 0.1)
_register("medium", 650, 0.5, 0.05)
_register("large", 1500, 0.65, 0.04)
