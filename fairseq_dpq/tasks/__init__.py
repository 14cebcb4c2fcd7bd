"""Tasks of the paper that fairseq lacks: language modelling with carried hidden state.
Importing this package registers `--task stateful_lm`."""

from .lanes import LaneDataset, LaneIterator, TokenStream
from .truncated_bptt_lm import StatefulLanguageModelingTask

__all__ = ["LaneDataset", "LaneIterator", "StatefulLanguageModelingTask", "TokenStream"]
