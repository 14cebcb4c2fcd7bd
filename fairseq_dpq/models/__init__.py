"""Models of the paper that fairseq lacks: the LSTM language model of Zaremba et al. (2014), and
RoBERTa for questions. Importing this package registers `--arch roberta_qa` and `--arch
zaremba_lstm_lm_{small,medium,large}`."""

from .lstm_lm import ZarembaLSTMDecoder, ZarembaLSTMLanguageModel
from .roberta_qa import RobertaForQuestionAnswering

__all__ = ["RobertaForQuestionAnswering", "ZarembaLSTMDecoder", "ZarembaLSTMLanguageModel"]
