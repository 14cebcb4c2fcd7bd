"""What classification and question answering share: the data folder with its parts, and batches of
inputs whose targets are numbers."""

from __future__ import annotations

import os
from typing import Any, Sequence

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.tasks import FairseqTask

from fairseq_dpq.config import DPQConfigError


class Examples(FairseqDataset):
    """Inputs of different lengths. An item has an `id` and `tokens`; whatever else it has becomes
    tensors of the batch. `sizes` are the lengths, or upper bounds of them."""

    def __init__(self, sizes: Sequence[int], pad: int) -> None:
        super().__init__()
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.pad = pad

    def __len__(self) -> int:
        return len(self.sizes)

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch, with padding at the right; it has one column at least."""
        if not samples:
            return {}
        tokens = [sample["tokens"] for sample in samples]
        lengths = torch.tensor([len(t) for t in tokens])
        batch: dict[str, Any] = {
            name: torch.tensor([sample[name] for sample in samples])
            for name in samples[0]
            if name != "tokens"
        }
        columns = data_utils.collate_tokens(tokens, self.pad, pad_to_length=1)
        batch["net_input"] = {"src_tokens": columns, "src_lengths": lengths}
        return {**batch, "nsentences": len(samples), "ntokens": int(lengths.sum())}

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    size = num_tokens

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self.sizes[indices])


class FolderTask(FairseqTask):
    """A task whose folder --data has a part for each kind of text, with binarised splits."""

    dictionary: Dictionary
    source_dictionary = property(lambda self: self.dictionary)
    target_dictionary = None  # targets are numbers, not words: none may be ignored as padding

    def path(self, *parts: str) -> str:
        """A place in the folder."""
        return os.path.join(self.cfg.data, *parts)

    def read_dictionary(self, part: str) -> Dictionary:
        """The dictionary of a part."""
        path = self.path(part, "dict.txt")
        if not os.path.isfile(path):
            raise DPQConfigError(
                f"no {path}; scripts/prepare.sh makes such a folder (docs/datasets.md)"
            )
        return Dictionary.load(path)

    def read_split(self, part: str, split: str, dictionary: Dictionary) -> Any:
        """One part of a split."""
        found = data_utils.load_indexed_dataset(self.path(part, split), dictionary)
        if found is None:
            raise DPQConfigError(
                f"no binarised {split} split in {self.path(part)}; scripts/prepare.sh makes it"
            )
        return found
