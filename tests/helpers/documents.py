"""Labelled documents for the tests of text classification: rows, files, and fairseq's folder."""

from __future__ import annotations

import random
from pathlib import Path

from experiments.datasets.__main__ import prepare

FLAGS = (
    "--task text_classification --criterion sentence_prediction --arch text_classifier "
    "--encoder-embed-dim 32 --hidden-size 16 --batch-size 12 "
)


def make_rows(count: int, seed: int, classes: tuple[str, ...] = ("no", "yes")) -> list[list[str]]:
    """Label and text; each class has twenty words of its own, and all share twenty more."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        k = rng.randrange(len(classes))
        own = [f"{classes[k]}{rng.randrange(20)}" for _ in range(rng.randint(2, 6))]
        words = [*own, *(f"any{rng.randrange(20)}" for _ in range(rng.randint(0, 4)))]
        rows.append([classes[k], " ".join(words)])
    return rows


def write_csv(path: Path, rows: list[list[str]]) -> Path:
    """Every field in quotes, as in the sets of Zhang et al."""
    quoted = [",".join('"' + f.replace('"', '""') + '"' for f in row) for row in rows]
    path.write_text("".join(line + "\n" for line in quoted), encoding="utf-8")
    return path


def make_documents(root: Path) -> Path:
    """120 training and 24 test documents of two classes, prepared by the package's own script;
    the first test document is empty."""
    train = write_csv(root / "train.csv", make_rows(126, 1))
    test = write_csv(root / "test.csv", [["no", "."], *make_rows(23, 2)])
    flags = ["--train", train, "--test", test, "--held-out", "0.1", "--workers", 1]
    flags += ["--out", root / "bin", "--work", root / "work"]
    assert prepare("csv_files", [str(flag) for flag in flags]) == 0
    return root / "bin"
