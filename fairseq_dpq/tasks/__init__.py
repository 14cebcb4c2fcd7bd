"""Tasks of the paper that fairseq lacks: language modelling with carried hidden state, and
questions about paragraphs. Importing this package registers `--task stateful_lm`, `--task squad`
and `--criterion squad_span`."""

from .lanes import LaneDataset, LaneIterator, TokenStream
from .squad import SquadDataset, SquadSpanCriterion, SquadTask
from .truncated_bptt_lm import StatefulLanguageModelingTask

__all__ = [
    "LaneDataset",
    "LaneIterator",
    "SquadDataset",
    "SquadSpanCriterion",
    "SquadTask",
    "StatefulLanguageModelingTask",
    "TokenStream",
]
