"""Tasks of the paper that fairseq lacks: language modelling with carried hidden state, text
classification, and questions about paragraphs. Importing this package registers `--task
stateful_lm`, `--task text_classification`, `--task squad` and `--criterion squad_span`."""

from .documents import LabelledDocuments
from .lanes import LaneDataset, LaneIterator, TokenStream
from .squad import SquadDataset, SquadSpanCriterion, SquadTask
from .text_classification import TextClassificationTask
from .truncated_bptt_lm import StatefulLanguageModelingTask

__all__ = [
    "LabelledDocuments",
    "LaneDataset",
    "LaneIterator",
    "SquadDataset",
    "SquadSpanCriterion",
    "SquadTask",
    "StatefulLanguageModelingTask",
    "TextClassificationTask",
    "TokenStream",
]
