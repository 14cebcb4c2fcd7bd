"""SQuAD files: which pieces answer, and what becomes of answers that are not in their context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.datasets.__main__ import prepare
from experiments.datasets.pieces import SPECIALS, Piece
from experiments.datasets.squad import find_pieces
from helpers.data_server import tree

WORDS = ["who", "is", "the", "cat", "##s", "?", "caf", "##e", "sat", "."]
CONTEXT = "The Cats  sat. Caf\u00e9."


def item(name: str, text: str | None, start: int = 0, **more: Any) -> dict[str, Any]:
    answers = [] if text is None else [{"text": text, "answer_start": start}]
    return {"id": name, "question": "Who is the cat?", "answers": answers, **more}


def write(folder: Path, version: str, *items: dict[str, Any], context: str = CONTEXT) -> list[str]:
    (folder / "from").mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]) + "\n")
    data = {"data": [{"paragraphs": [{"context": context, "qas": list(items)}]}]}
    for split in ("train", "dev"):
        path = folder / "from" / f"{split}-v{version}.json"
        path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    flags = ["--from", folder / "from", "--vocab", folder / "vocab.txt", "--no-checksum"]
    flags += ["--out", folder / "out" / "bin", "--work", folder / "work", "--workers", 1]
    return [str(flag) for flag in flags]


def test_pieces_of_an_answer() -> None:
    places = [Piece("a", 0, 2), Piece("b", 2, 4), Piece("c", 6, 8)]
    assert find_pieces(places, 0, 2) == (0, 0)
    assert find_pieces(places, 1, 3) == (0, 1)  # inside pieces: both are touched
    assert find_pieces(places, 2, 8) == (1, 2)
    assert find_pieces(places, 4, 6) is None  # white space


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        (
            "squad1",
            item("q7", "Cat", 5),
            "question q7: its context does not have the answer 'Cat' at",
        ),
        (
            "squad1",
            item("q7", "cats", 4),
            "question q7: its context does not have the answer 'cats'",
        ),
        ("squad1", item("q7", " ", 9), "question q7: its context does not have the answer ' '"),
        (
            "squad1",
            item("q7", None),
            "question q7 has no answer; questions without one are in SQuAD 2",
        ),
        (
            "squad2",
            item("q7", "dog", 4),
            "question q7: its context does not have the answer 'dog' at",
        ),
        ("squad1", {"id": "q7"}, "not a SQuAD file: no 'question'"),
        ("squad1", {"id": "q7", "question": 7}, "question 'q7': 'question' is not of type str"),
        (
            "squad1",
            {"id": "q7", "question": "who", "answers": [{"text": "Cats"}]},
            "not a SQuAD file: no 'answer_start'",
        ),
        ("squad1", item("q7", "Cats", "4"), "question 'q7': 'answer_start' is not of type int"),
    ],
)
def test_bad_answers_give_one_line_and_no_folder(
    tmp_path: Path, name: str, bad: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = write(tmp_path, "1.1" if name == "squad1" else "2.0", item("q1", "Cats", 4), bad)
    assert prepare(name, flags) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"data": [', "not JSON"), (b"\xff", "not UTF-8"), (b'{"data": []}', "no questions in it")],
)
def test_bad_files(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = write(tmp_path, "1.1")
    (tmp_path / "from" / "train-v1.1.json").write_bytes(content)
    assert prepare("squad1", flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_data_of_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [
        item("q1", "Cats", 4),
        item("q2", "Caf\u00e9", 15),
        item("q3", None, is_impossible=True),
    ]
    assert prepare("squad2", write(tmp_path, "2.0", *items)) == 0
    printed = capsys.readouterr().out
    assert "| train: 3 questions, 2 with an answer" in printed
    assert "warning: train questions: 3, documented is 130319" in printed
    out = tmp_path / "out" / "bin"
    # the cat ##s sat . caf ##e .
    assert (out / "train.spans").read_text() == "1 2\n5 6\n-1 -1\n"
    context = np.fromfile(out / "context" / "train.bin", dtype=np.uint16).tolist()
    assert context == [6, 7, 8, 12, 13, 10, 11, 13, 2] * 3
    question = np.fromfile(out / "question" / "valid.bin", dtype=np.uint16).tolist()
    assert question == [4, 5, 6, 7, 9, 2] * 3
    lines = (out / "valid.examples.jsonl").read_text(encoding="utf-8").splitlines()
    examples = [json.loads(line) for line in lines]
    assert [e["answers"] for e in examples] == [["Cats"], ["Caf\u00e9"], []]
    start, end = examples[1]["offsets"][5][0], examples[1]["offsets"][6][1]
    assert examples[1]["context"][start:end] == "Caf\u00e9"
    assert "train.examples.jsonl" not in tree(out)
