"""Text classification: `--task text_classification`, one of C classes for each document.
Data as fairseq's sentence_prediction has it: words in DATA/input0, classes in DATA/label."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

import logging
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

import numpy as np
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, ListDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_dpq.config import DPQConfigError

from .examples import Examples, FolderTask
from .text_classifier import step_all

logger = logging.getLogger(__name__)


@dataclass
class TextClassificationConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "path to data directory"})
    max_words: int = field(
        default=0, metadata={"help": "use the first words of a document only (0: all)"}
    )
    seed: int = II("common.seed")


class LabelledDocuments(Examples):
    """Documents of word ids, each with a class from 0 to C-1, or without classes.

    A stored document ends in `eos`, which is not a word. Words outside the dictionary are left
    out: with every training word in it, nothing would train the vector of `<unk>`.
    """

    def __init__(
        self,
        documents: Any,
        labels: Optional[np.ndarray],
        dictionary: Dictionary,
        cfg: TextClassificationConfig,
        shuffle: bool = False,
    ) -> None:
        self.documents, self.labels = documents, labels
        self.unk, self.eos = dictionary.unk(), dictionary.eos()
        self.max_words = cfg.max_words or None
        self.seed, self.shuffle, self.epoch = cfg.seed, shuffle, 1
        # With the end of line as a word: an empty document has one column too.
        sizes = np.minimum(documents.sizes, cfg.max_words) if cfg.max_words else documents.sizes
        super().__init__(sizes, dictionary.pad())

    def __getitem__(self, index: int) -> Dict[str, Any]:
        words = self.documents[index].long()
        words = words[(words != self.eos) & (words != self.unk)]
        item = {"id": int(index), "tokens": words[: self.max_words]}
        return item if self.labels is None else {**item, "target": int(self.labels[index])}

    def ordered_indices(self) -> np.ndarray:
        """Random in training, because batch norm needs batches that are alike: short documents
        have means of larger variance. By length in evaluation, for little padding."""
        if self.shuffle:
            return np.random.RandomState([self.seed, self.epoch]).permutation(len(self))
        return np.argsort(self.sizes, kind="mergesort")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Batches are drawn again in each epoch."""
        return not self.shuffle


@register_task("text_classification", dataclass=TextClassificationConfig)
class TextClassificationTask(FolderTask):
    """Documents and their classes. `--criterion sentence_prediction` logs the accuracy."""

    def __init__(self, cfg: TextClassificationConfig, **kwargs: Any) -> None:
        super().__init__(cfg, **kwargs)
        if cfg.max_words < 0:
            raise DPQConfigError(f"--max-words {cfg.max_words}: must be 0 (all) or more")
        self.dictionary = self.read_dictionary("input0")
        self.label_dictionary = self.read_dictionary("label")
        if len(self.classes) < 2:
            raise DPQConfigError(
                f"{self.path('label', 'dict.txt')}: a classifier needs two classes or more"
            )

    @property
    def classes(self) -> List[str]:
        """The label of each class, without the fillers that fairseq-preprocess may add."""
        symbols = self.label_dictionary.symbols[self.label_dictionary.nspecial :]
        return [symbol for symbol in symbols if not symbol.startswith("madeupword")]

    def load_dataset(self, split: str, epoch: int = 1, **kwargs: Any) -> None:
        """Load the documents and the classes of a split."""
        documents = self.read_split("input0", split, self.dictionary)
        labels = self.read_split("label", split, self.label_dictionary)
        if not len(documents) == len(labels) > 0:
            raise DPQConfigError(
                f"{split}: {len(documents)} documents in {self.path('input0')}, but "
                f"{len(labels)} labels in {self.path('label')}"
            )
        # A label and the end of line.
        ids = np.fromiter((int(label[0]) for label in labels), np.int64, len(labels))
        special = self.label_dictionary.nspecial
        wrong = np.flatnonzero((np.asarray(labels.sizes) != 2) | (ids < special))
        if len(wrong):
            raise DPQConfigError(
                f"{split}: document {wrong[0] + 1} needs one label, which is in "
                f"{self.path('label', 'dict.txt')}"
            )
        logger.info("%s: %s documents", split, f"{len(documents):,}")
        self.datasets[split] = LabelledDocuments(
            documents, ids - special, self.dictionary, self.cfg, shuffle=split == "train"
        )

    def build_dataset_for_inference(
        self, src_tokens: List[Tensor], src_lengths: Any, **kwargs: Any
    ) -> LabelledDocuments:
        """Documents without classes."""
        documents = ListDataset(src_tokens, np.array(src_lengths))
        return LabelledDocuments(documents, None, self.dictionary, self.cfg)

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        super().optimizer_step(optimizer, model, update_num)
        step_all(model)

    def reduce_metrics(
        self, logging_outputs: List[Dict[str, Any]], criterion: FairseqCriterion
    ) -> None:
        """Log the accuracy with two decimals, which choose the best checkpoint as well."""
        super().reduce_metrics(logging_outputs, criterion)
        for aggregator in metrics.get_active_aggregators():
            if "accuracy" in aggregator:
                aggregator["accuracy"].round = 2
