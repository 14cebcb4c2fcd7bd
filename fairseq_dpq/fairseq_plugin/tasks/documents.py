"""Labelled documents as a fairseq data set: what the text classification task reads."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import torch
from fairseq.data import FairseqDataset
from torch import Tensor


class LabelledDocuments(FairseqDataset):
    """Documents of word ids, each with a class from 0 to C-1, or without classes.

    A stored document ends in `eos`, which is not a word. Words outside the dictionary are left
    out: with every training word in it, nothing would train the vector of `<unk>`.
    """

    def __init__(
        self,
        documents: Any,
        labels: Sequence[int] | np.ndarray | None,
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

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.documents[index].long()
        words = words[(words != self.eos) & (words != self.unk)]
        if self.max_words:
            words = words[: self.max_words]
        label = None if self.labels is None else int(self.labels[index])
        return {"id": int(index), "words": words, "label": label}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch: words (documents, length) with padding, at least one column, and classes."""
        if not samples:
            return {}
        lengths = torch.tensor([len(sample["words"]) for sample in samples])
        tokens = torch.full((len(samples), max(1, int(lengths.max()))), self.pad)
        for row, sample in zip(tokens, samples):
            row[: len(sample["words"])] = sample["words"]
        batch: dict[str, Any] = {
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

    @property
    def supports_prefetch(self) -> bool:
        return False


class DocumentList:
    """Documents in memory, with the sizes that `LabelledDocuments` wants."""

    def __init__(self, documents: Sequence[Tensor]) -> None:
        self.documents = documents
        self.sizes = np.array([len(document) for document in documents], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Tensor:
        return self.documents[index]
