"""Text classification: `--task text_classification`, one of C classes for each document.
Data as fairseq's sentence_prediction has it: words in DATA/input0, classes in DATA/label."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

import logging
import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_dpq.config import DPQConfigError

from .text_classifier import step_all

logger = logging.getLogger(__name__)


class LabelledDocuments(FairseqDataset):
    """Documents of word ids, each with a class from 0 to C-1, or without classes.

    A stored document ends in `eos`, which is not a word. Words outside the dictionary are left
    out: with every training word in it, nothing would train the vector of `<unk>`.
    """

    def __init__(
        self,
        documents: Any,
        labels: Optional[np.ndarray],
        pad: int,
        unk: int,
        eos: int,
        max_words: int = 0,
        shuffle: bool = False,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.documents = documents
        self.labels = labels
        self.pad, self.unk, self.eos = pad, unk, eos
        self.max_words = max_words
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 1
        # Upper bounds, with the end of line as a word: an empty document has one column too.
        stored = np.asarray(documents.sizes)
        self.sizes = np.minimum(stored, max_words) if max_words else stored

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        words = self.documents[index].long()
        words = words[(words != self.eos) & (words != self.unk)]
        if self.max_words:
            words = words[: self.max_words]
        label = None if self.labels is None else int(self.labels[index])
        return {"id": int(index), "words": words, "label": label}

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        """A batch: words (documents, length) with padding, at least one column, and classes."""
        if not samples:
            return {}
        lengths = torch.tensor([len(sample["words"]) for sample in samples])
        tokens = torch.full((len(samples), max(1, int(lengths.max()))), self.pad)
        for row, sample in zip(tokens, samples):
            row[: len(sample["words"])] = sample["words"]
        batch: Dict[str, Any] = {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "net_input": {"src_tokens": tokens, "src_lengths": lengths},
        }
        if samples[0]["label"] is not None:
            batch["target"] = torch.tensor([sample["label"] for sample in samples])
        return batch

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self.sizes[indices])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

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


class DocumentList:
    """Documents in memory, with the sizes that `LabelledDocuments` wants."""

    def __init__(self, documents: Sequence[Tensor]) -> None:
        self.documents = documents
        self.sizes = np.array([len(document) for document in documents], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Tensor:
        return self.documents[index]


@dataclass
class TextClassificationConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "path to data directory"})
    max_words: int = field(
        default=0, metadata={"help": "use the first words of a document only (0: all)"}
    )
    seed: int = II("common.seed")


@register_task("text_classification", dataclass=TextClassificationConfig)
class TextClassificationTask(FairseqTask):
    """Documents and their classes. `--criterion sentence_prediction` logs the accuracy."""

    def __init__(self, cfg: TextClassificationConfig, **kwargs: Any) -> None:
        super().__init__(cfg, **kwargs)
        if cfg.max_words < 0:
            raise DPQConfigError(f"--max-words {cfg.max_words}: must be 0 (all) or more")
        self.dictionary = self._load_dictionary("input0")
        self._labels = self._load_dictionary("label")
        if len(self.classes) < 2:
            raise DPQConfigError(
                f"{self._path('label', 'dict.txt')}: a classifier needs two classes or more"
            )
        logger.info("dictionary: %d types; %d classes", len(self.dictionary), len(self.classes))

    def _path(self, *parts: str) -> str:
        return os.path.join(self.cfg.data, *parts)

    def _load_dictionary(self, part: str) -> Dictionary:
        path = self._path(part, "dict.txt")
        if not os.path.isfile(path):
            raise DPQConfigError(
                f"no {path}; scripts/prepare.sh makes such a folder (docs/datasets.md)"
            )
        return Dictionary.load(path)

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> None:
        """None: targets are classes, not words, so no class may be ignored as padding."""
        return None

    @property
    def label_dictionary(self) -> Dictionary:
        return self._labels

    @property
    def classes(self) -> List[str]:
        """The label of each class, without the fillers that fairseq-preprocess may add."""
        symbols = self._labels.symbols[self._labels.nspecial :]
        return [symbol for symbol in symbols if not symbol.startswith("madeupword")]

    # ---- data ----

    def load_dataset(
        self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any
    ) -> None:
        """Load the documents and the classes of a split."""
        documents = self._load_split("input0", split, self.dictionary)
        labels = self._load_split("label", split, self._labels)
        if len(documents) != len(labels):
            raise DPQConfigError(
                f"{split}: {len(documents)} documents in {self._path('input0')}, but "
                f"{len(labels)} labels in {self._path('label')}"
            )
        if not len(documents):
            raise DPQConfigError(f"{split}: no documents in {self._path('input0')}")
        logger.info("%s: %s documents", split, f"{len(documents):,}")
        self.datasets[split] = self._make_dataset(
            documents, self._read_classes(split, labels), shuffle=split == "train"
        )

    def _load_split(self, part: str, split: str, dictionary: Dictionary) -> Any:
        path = self._path(part, split)
        found = data_utils.load_indexed_dataset(path, dictionary, combine=False)
        if found is None:
            raise DPQConfigError(f"no binarised {split} split in {self._path(part)}")
        return found

    def _read_classes(self, split: str, labels: Any) -> np.ndarray:
        wrong = np.flatnonzero(np.asarray(labels.sizes) != 2)  # a label and the end of line
        if len(wrong):
            raise DPQConfigError(
                f"{split}: document {wrong[0] + 1} has {labels.sizes[wrong[0]] - 1} labels, "
                "expected one"
            )
        ids = np.fromiter((int(label[0]) for label in labels), np.int64, len(labels))
        unknown = np.flatnonzero(ids < self._labels.nspecial)
        if len(unknown):
            raise DPQConfigError(
                f"{split}: the label of document {unknown[0] + 1} is not in "
                f"{self._path('label', 'dict.txt')}"
            )
        return ids - self._labels.nspecial

    def _make_dataset(self, documents: Any, labels: Any, shuffle: bool) -> LabelledDocuments:
        words = self.dictionary
        return LabelledDocuments(
            documents,
            labels,
            words.pad(),
            words.unk(),
            words.eos(),
            self.cfg.max_words,
            shuffle,
            self.cfg.seed,
        )

    def build_dataset_for_inference(
        self, src_tokens: List[Tensor], src_lengths: Any, **kwargs: Any
    ) -> LabelledDocuments:
        """Documents without classes."""
        return self._make_dataset(DocumentList(src_tokens), None, shuffle=False)

    def max_positions(self) -> None:
        return None

    # ---- training ----

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
