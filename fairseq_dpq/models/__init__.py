"""Models of the paper that fairseq lacks: the LSTM language model of Zaremba et al. (2014).
Importing this package registers `--arch zaremba_lstm_lm_{small,medium,large}`."""

from .lstm_lm import ZarembaLSTMDecoder, ZarembaLSTMLanguageModel

__all__ = ["ZarembaLSTMDecoder", "ZarembaLSTMLanguageModel"]
