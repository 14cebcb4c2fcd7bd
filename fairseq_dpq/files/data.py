"""The data that a fairseq model was trained with: the dictionaries of its tables, its task and the
model itself, and text by which the use of its tables is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor

from fairseq_dpq.any_model.calibration import Use, calibrate
from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.model import find_tables

_BATCH = 2000  # tokens of a batch


# Dictionaries -------------------------------------------------------------------------------------


def read_dictionary(file: Path) -> Any:
    """A dictionary of fairseq."""
    from fairseq.data import Dictionary

    try:
        return Dictionary.load(str(file))
    except OSError as error:
        raise CheckpointError(f"--dict {file}: cannot read it: {error.strerror}") from error
    except Exception as error:  # fairseq raises plain ones
        raise CheckpointError(f"--dict {file}: not a fairseq dictionary: {error}") from error


def symbols_of(checkpoint: Checkpoint, path: str, rows: int, given: str | Path | None) -> list[str]:
    """The symbols of a table, one for each row: of the dictionary `given`, or of the one in the
    data that the checkpoint was trained with."""
    file = Path(given or find_dictionary(checkpoint, path))
    symbols = list(read_dictionary(file).symbols)
    if len(symbols) == rows - 1:
        symbols.append("<mask>")  # added by the tasks of masked language models
    if len(symbols) != rows:
        raise CheckpointError(
            f"--dict {file} has {len(symbols)} symbols, {path} has {rows} rows; "
            "give the dictionary that the model was trained with, or --no-symbols"
        )
    return symbols


def find_dictionary(checkpoint: Checkpoint, path: str) -> Path:
    """The dictionary in the data that the checkpoint was trained with."""
    cfg = checkpoint.state.get("cfg")
    task: Any = get_option(cfg, "task") if cfg else checkpoint.state["args"]
    given = [part for part in str(get_option(task, "data") or "").split(":") if part]
    # A relative path is that of the training's folder, which is often above the checkpoint's.
    above = [Path(), *list(checkpoint.path.absolute().parents)[:2]]
    places = list(dict.fromkeys(folder / part for folder in above for part in given))
    languages = [get_option(task, key) for key in ("source_lang", "target_lang")]
    if None in languages:
        languages = _guess_languages(places)
    language = languages[1 if path.startswith("decoder") else 0]
    names = [f"dict.{language}.txt"] if language else []
    tried = [place / name for place in places for name in [*names, "dict.txt", "input0/dict.txt"]]
    for file in tried:
        if file.is_file():
            return file
    where = f" ({', '.join(map(str, tried))} not found)" if tried else ""
    raise CheckpointError(
        f"the dictionary of {path} is not where the model was trained{where}; add --dict FILE, or "
        "--no-symbols"
    )


def _guess_languages(places: list[Path]) -> list[str | None]:
    """Source and target where no flag named them: from the names of the data, as fairseq does."""
    for place in places:
        for file in sorted(place.glob("*.*-*.*.idx")) if place.is_dir() else []:
            pair = file.name.split(".")[1].split("-")
            if len(pair) == 2:
                return [pair[0], pair[1]]
    return [None, None]


# Models and text ----------------------------------------------------------------------------------


def load_model(path: Path, task: str, changes: dict[str, Any], fix: str) -> tuple[Any, Any]:
    """(model, task) of a checkpoint of --task `task`; `changes` are options of the task that
    differ from training, `fix` says what to do about a model of another task."""
    state = Checkpoint.load(path).state  # with the allow-list, and its errors in one line
    own = get_option(get_option(state.get("cfg"), "task"), "_name")
    if own != task:
        raise CheckpointError(f"{path} is a model of --task {own}, not of --task {task}{fix}")
    data = changes.get("data") or get_option(get_option(state["cfg"], "task"), "data")
    if not Path(str(data)).is_dir():
        raise CheckpointError(
            f"no folder {data}, where the checkpoint's dictionaries were; name it by --data"
        )
    del state  # fairseq reads the file itself; one copy in memory is enough
    named = f"{data}; name the folder that it was trained on by --data"
    model, _, task = _load_model(path, changes, named)
    return model, task


def _load_model(path: Path, changes: dict[str, Any], data: str) -> tuple[Any, Any, Any]:
    """(model, cfg, task) as fairseq loads them; `data`: where dictionaries are from, in words."""
    from fairseq import checkpoint_utils

    try:
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides=changes
        )
    except OSError as error:
        raise CheckpointError(f"{path}: not the dictionaries in {data} ({error})") from error
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        what = str(error).split("\n", 1)[-1].strip()
        raise CheckpointError(f"{path} does not fit the dictionaries in {data} ({what})") from error
    return models[0], cfg, task


def dictionary_use(checkpoint: Checkpoint, path: str, rows: int, given: str | None) -> Use | None:
    """The counts of a table's dictionary; None where it has none, or is not to be found."""
    try:
        dictionary = read_dictionary(Path(given or find_dictionary(checkpoint, path)))
    except CheckpointError:
        if given:
            raise
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
    model, cfg, task = _load_model(path, {"data": data}, f"--calibrate {data}")
    try:
        task.load_dataset(subset)
    except (FileNotFoundError, StopIteration) as error:
        raise CheckpointError(f"--calibrate {data}: no --subset {subset} there") from error
    tables = find_tables(model)
    batches = _batches(task, subset, tokens, cfg.dataset.batch_size)
    try:
        uses = calibrate(model, tables, batches)
    except ValueError as error:  # of the task too: too little text for its lanes
        raise CheckpointError(f"--calibrate {data}, --subset {subset}: {error}") from error
    return {path: use for table, use in zip(tables, uses) for path in table.paths}


def _batches(task: Any, subset: str, tokens: int, most: int | None) -> Iterator[dict[str, Tensor]]:
    """`most` is --batch-size of training, which some tasks need."""
    limits = {"max_tokens": _BATCH, "max_sentences": most}
    data = task.dataset(subset)
    order = task.get_batch_iterator(data, **limits, ignore_invalid_inputs=True, seed=1)
    for sample in order.next_epoch_itr(shuffle=True):
        if tokens <= 0:
            return
        tokens -= int(sample["ntokens"])
        yield sample["net_input"]
