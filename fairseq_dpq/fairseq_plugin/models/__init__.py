"""Models of the paper that fairseq lacks: the LSTM language model of Zaremba et al. (2014), the
text classifier, and RoBERTa for questions. Importing this package registers `--arch roberta_qa`,
`--arch text_classifier` and `--arch zaremba_lstm_lm_{small,medium,large}`."""

from .lstm_lm import ZarembaLSTMDecoder, ZarembaLSTMLanguageModel
from .roberta_qa import RobertaForQuestionAnswering
from .text_classifier import TextClassifier

__all__ = [
    "RobertaForQuestionAnswering",
    "TextClassifier",
    "ZarembaLSTMDecoder",
    "ZarembaLSTMLanguageModel",
]
