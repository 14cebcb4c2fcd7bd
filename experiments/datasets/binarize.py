"""fairseq-preprocess, the last step of every data set.

It runs in its own process. Its output is kept for the error message.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Mapping, Sequence

from experiments.datasets import PrepareError


def require_fairseq() -> None:
    """Fail before the download if fairseq, which the last step needs, is missing."""
    if importlib.util.find_spec("fairseq_cli") is None:
        raise PrepareError(
            f"fairseq is not installed for {sys.executable}; pip install 'fairseq-dpq[fairseq]', "
            "or set PYTHON to the interpreter that has it"
        )


def preprocess(destdir: Path, arguments: Sequence[str], workers: int) -> None:
    """Run fairseq-preprocess into `destdir`."""
    command: list[str] = [sys.executable, "-m", "fairseq_cli.preprocess", *arguments]
    command += ["--destdir", str(destdir), "--workers", str(max(1, workers))]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
        raise PrepareError(f"fairseq-preprocess failed ({done.returncode}): {lines[-1]}")
    # It names temporary paths, and two runs must give the same files.
    (destdir / "preprocess.log").unlink(missing_ok=True)


def preprocess_parts(
    folder: Path, dictionaries: Mapping[str, Path], splits: Sequence[str], workers: int
) -> None:
    """Binarise FOLDER/scratch/SPLIT.PART into FOLDER/PART, each part with its own dictionary."""
    for part, dictionary in dictionaries.items():
        print(f"| fairseq-preprocess: {part}", flush=True)
        arguments = ["--only-source", "--srcdict", str(dictionary)]
        for split in splits:
            arguments += [f"--{split}pref", str(folder / "scratch" / f"{split}.{part}")]
        preprocess(folder / part, arguments, workers)


def preprocess_shards(
    folder: Path, base: Sequence[str], shards: Sequence[Path], held_out: Sequence[str], workers: int
) -> None:
    """Binarise the training text shard by shard: train, train1, ..., which training reads as one.

    fairseq keeps Python numbers for all sentences of a file, and with NumPy 2 its offsets overflow
    beyond 2 GiB. `held_out` are the flags of the other splits.
    """
    for number, prefix in enumerate(shards):
        print(f"| fairseq-preprocess: training shard {number + 1} of {len(shards)}", flush=True)
        arguments = [*base, "--trainpref", str(prefix)]
        if number == 0:
            preprocess(folder, [*arguments, *held_out], workers)
            continue
        part = folder / "scratch" / "part"
        preprocess(part, arguments, workers)
        for path in part.glob("train.*"):
            path.rename(folder / path.name.replace("train.", f"train{number}.", 1))
        shutil.rmtree(part)


def dictionary_size(path: Path) -> int:
    """Entries of a fairseq dictionary once loaded: its lines and the four specials."""
    with open(path, "rb") as stream:
        return sum(1 for line in stream if line.strip()) + 4


def write_dictionary(
    path: Path, words: Sequence[str], counts: Mapping[str, int] | None = None
) -> None:
    """Write words, in this order, as a dict.txt that fairseq reads back unchanged. Without counts,
    every word has 1."""
    seen = {"<s>", "<pad>", "</s>", "<unk>"}
    lines: list[str] = []
    for number, word in enumerate(words, start=1):
        if word in seen or word.split() != [word]:
            what = "occurs twice" if word in seen else "is not a single token"
            raise PrepareError(f"vocabulary entry {number}, {word!r}, {what}")
        seen.add(word)
        lines.append(f"{word} {1 if counts is None else counts.get(word, 0)}\n")
    path.write_bytes("".join(lines).encode("utf-8"))
