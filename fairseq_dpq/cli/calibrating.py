"""How the tables of a fairseq model are used: by its dictionary, or by text in a data-bin."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor

from fairseq_dpq.any_model.calibration import Use, calibrate
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.dictionaries import find_dictionary
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.model import find_tables

_BATCH = 2000  # tokens of a batch


def dictionary_use(checkpoint: Checkpoint, path: str, rows: int, given: str | None) -> Use | None:
    """The counts of a table's dictionary; None where it has none, or is not to be found."""
    from fairseq.data import Dictionary

    try:
        file = Path(given) if given else find_dictionary(checkpoint, path)
        dictionary = Dictionary.load(str(file))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"--dict {given}: cannot read it: {error}") from error
    except CheckpointError:
        return None  # the order of ids stands for counts
    counts = torch.tensor(dictionary.count[:rows], dtype=torch.float32)
    words = counts[dictionary.nspecial :]
    if len(counts) < rows - 1 or not len(words) or bool((words == words[0]).all()):
        return None  # of another vocabulary, or of subwords that nobody counted
    counts = torch.cat([counts, counts.new_zeros(rows - len(counts))])
    # A dictionary does not count its special symbols: each sentence has one end, a few unknowns.
    counts[: dictionary.nspecial] = 0
    counts[dictionary.eos()] = words.max()
    counts[dictionary.unk()] = words.median()
    return Use(counts)


def text_use(path: Path, data: str, subset: str, tokens: int) -> dict[str, Use]:
    """How a model uses its tables on `tokens` tokens of a data-bin, by path."""
    if not Path(data).is_dir():
        raise CheckpointError(f"--calibrate {data}: no such folder; name a data-bin")
    from fairseq import checkpoint_utils

    logging.getLogger("fairseq").setLevel(logging.WARNING)
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": data}
    )
    try:
        task.load_dataset(subset)
    except (FileNotFoundError, StopIteration) as error:
        raise CheckpointError(f"--calibrate {data}: no --subset {subset} there") from error
    tables = find_tables(models[0])
    uses = calibrate(models[0], tables, _batches(task, subset, tokens))
    return {path: use for table, use in zip(tables, uses) for path in table.paths}


def _batches(task: Any, subset: str, tokens: int) -> Iterator[dict[str, Tensor]]:
    order = task.get_batch_iterator(
        task.dataset(subset), max_tokens=_BATCH, ignore_invalid_inputs=True, seed=1
    )
    done = 0
    for sample in islice(order.next_epoch_itr(shuffle=True), 1 + tokens):
        if done >= tokens:
            return
        done += int(sample["ntokens"])
        yield sample["net_input"]
