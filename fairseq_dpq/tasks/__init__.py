"""Tasks of the paper that fairseq lacks: language modelling with carried hidden state, and text
classification. Importing this package registers `--task stateful_lm` and
`--task text_classification`."""

from .documents import LabelledDocuments
from .lanes import LaneDataset, LaneIterator, TokenStream
from .text_classification import TextClassificationTask
from .truncated_bptt_lm import StatefulLanguageModelingTask

__all__ = [
    "LabelledDocuments",
    "LaneDataset",
    "LaneIterator",
    "StatefulLanguageModelingTask",
    "TextClassificationTask",
    "TokenStream",
]
