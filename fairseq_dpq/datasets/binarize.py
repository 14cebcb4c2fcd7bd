"""fairseq-preprocess, the last step of every data set.

It runs in its own process. Its output is kept for the error message.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Sequence

from fairseq_dpq.datasets.errors import PrepareError


def require_fairseq() -> None:
    """Fail before the download if fairseq, which the last step needs, is missing."""
    if importlib.util.find_spec("fairseq_cli") is None:
        raise PrepareError(
            f"fairseq is not installed for {sys.executable}; pip install 'fairseq-dpq[fairseq]', "
            "or set PYTHON to the interpreter that has it"
        )


def preprocess(destdir: Path, arguments: Sequence[str], workers: int) -> str:
    """Run fairseq-preprocess into `destdir` and return what it printed."""
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
    log = destdir / "preprocess.log"
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
        raise PrepareError(f"fairseq-preprocess failed ({done.returncode}): {lines[-1]}")
    if log.exists():
        log.unlink()  # it names temporary paths; two runs must give the same files
    return done.stdout


def dictionary_size(path: Path) -> int:
    """Entries of a fairseq dictionary once loaded: its lines and the four specials."""
    with open(path, "rb") as stream:
        return sum(1 for line in stream if line.strip()) + 4


def write_dictionary(path: Path, words: Sequence[str]) -> None:
    """Write words, in this order, as a dict.txt that fairseq reads back unchanged."""
    specials = {"<s>", "<pad>", "</s>", "<unk>"}
    seen = set(specials)
    lines: list[str] = []
    for number, word in enumerate(words, start=1):
        if word in seen or word.split() != [word]:
            what = "occurs twice" if word in seen else "is not a single token"
            raise PrepareError(f"vocabulary entry {number}, {word!r}, {what}")
        seen.add(word)
        lines.append(f"{word} 1\n")
    path.write_bytes("".join(lines).encode("utf-8"))
