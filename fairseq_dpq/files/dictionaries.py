"""The symbols of a table: the fairseq dictionary that its model was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq_dpq.fairseq_plugin.configs import get_option
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import CheckpointError


def symbols_of(checkpoint: Checkpoint, path: str, rows: int, given: str | None) -> list[str]:
    """The symbols of the table at `path`, from the file `given` or the checkpoint's own data."""
    file = Path(given) if given else find_dictionary(checkpoint, path)
    return read_dictionary(file, path, rows)


def read_dictionary(file: Path, path: str, rows: int) -> list[str]:
    """The symbols of a fairseq dictionary, one for each of the table's rows."""
    from fairseq.data import Dictionary

    try:
        dictionary = Dictionary.load(str(file))
    except OSError as error:
        raise CheckpointError(f"--dict {file}: cannot read it: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"--dict {file}: not a fairseq dictionary: {error}") from error
    symbols = list(dictionary.symbols)
    if len(symbols) == rows - 1:
        symbols.append("<mask>")  # added by the tasks of masked language models
    if len(symbols) != rows:
        raise CheckpointError(
            f"--dict {file} has {len(dictionary)} symbols, {path} has {rows} rows; "
            "give the dictionary that the model was trained with, or --no-symbols"
        )
    return symbols


def find_dictionary(checkpoint: Checkpoint, path: str) -> Path:
    """The dictionary in the data that the checkpoint was trained with."""
    cfg = checkpoint.state.get("cfg")
    task: Any = get_option(cfg, "task") if cfg else checkpoint.state["args"]
    data = get_option(task, "data")
    given = [Path(part) for part in str(data or "").split(":") if part]
    # A relative path is that of the training's folder, which is often above the checkpoint's.
    above = [Path(), *list(checkpoint.path.absolute().parents)[:2]]
    places = [folder / part for folder in above for part in given]
    places = list(dict.fromkeys(places))
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
