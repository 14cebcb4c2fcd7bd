"""Tasks and models of the paper that fairseq lacks: language modelling with carried hidden state,
text classification, and questions about paragraphs. Importing this package registers `--task
stateful_lm` with `--arch zaremba_lstm_lm_{small,medium,large}`, `--task text_classification` with
`--arch text_classifier`, `--task squad` with `--criterion squad_span` and `--arch roberta_qa`."""

from . import lstm_lm, squad, text_classification, text_classifier, truncated_bptt_lm

__all__ = ["lstm_lm", "squad", "text_classification", "text_classifier", "truncated_bptt_lm"]
