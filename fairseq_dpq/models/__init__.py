"""Models of the paper that fairseq lacks: the LSTM language model of Zaremba et al. (2014) and the
text classifier. Importing this package registers `--arch zaremba_lstm_lm_{small,medium,large}` and
`--arch text_classifier`."""

from .lstm_lm import ZarembaLSTMDecoder, ZarembaLSTMLanguageModel
from .text_classifier import TextClassifier

__all__ = ["TextClassifier", "ZarembaLSTMDecoder", "ZarembaLSTMLanguageModel"]
