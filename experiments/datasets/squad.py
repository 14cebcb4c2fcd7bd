"""Questions about paragraphs, SQuAD 1.1 and 2.0, as the data of the task squad: pieces of questions
and contexts, and the pieces that answer."""

from __future__ import annotations

import contextlib
import json
import shutil
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator

from experiments.datasets import pieces
from experiments.datasets.binarize import dictionary_size, preprocess_parts
from experiments.datasets.cli import Result, Run
from experiments.datasets.errors import PrepareError
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import ordered_map

PARTS = ("question", "context")
_PARAGRAPHS = 200  # in a chunk
Encoded = Dict[str, str]  # a line for each file of a split


class BadQuestion(PrepareError):
    """A question whose answers do not fit its context."""


@dataclass(frozen=True)
class QuestionSet:
    """A version of SQuAD: its files, the number of questions, whether some have no answer."""

    title: str
    files: dict[str, RequiredFile]
    questions: dict[str, int]
    unanswerable: bool


def _version(number: str, train: int, valid: int, unanswerable: bool) -> QuestionSet:
    name = f"squad{number[0]}"
    url = "https://rajpurkar.github.io/SQuAD-explorer/dataset/{}"
    parts = {"train": f"train-v{number}.json", "valid": f"dev-v{number}.json"}
    files = {split: required(name, file, [url]) for split, file in parts.items()}
    questions = {"train": train, "valid": valid}
    return QuestionSet(f"SQuAD {number}", files, questions, unanswerable)


SETS = {
    "squad1": _version("1.1", 87599, 10570, unanswerable=False),
    "squad2": _version("2.0", 130319, 11873, unanswerable=True),
}


def read_paragraphs(path: Path) -> list[dict[str, Any]]:
    """All paragraphs with their questions."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        paragraphs = [p for article in data["data"] for p in article["paragraphs"]]
        for paragraph in paragraphs:
            if not isinstance(paragraph["context"], str):
                raise TypeError("a context is not a string")
            for item in paragraph["qas"]:
                _check_question(item)
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path}: not UTF-8 text ({error})") from error
    except json.JSONDecodeError as error:
        raise PrepareError(f"{path}: not JSON ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PrepareError(f"{path}: not a SQuAD file: {what}") from error
    return paragraphs


def _check_question(item: dict[str, Any]) -> None:
    """The fields that are read later, with their types."""
    name = item["id"]
    for key in ("id", "question"):
        if not isinstance(item[key], str):
            raise TypeError(f"question {name!r}: {key!r} is not a string")
    for answer in item.get("answers", []):
        if not isinstance(answer["text"], str):
            raise TypeError(f"question {name!r}: an answer's 'text' is not a string")
        start = answer["answer_start"]
        if not isinstance(start, int) or isinstance(start, bool):
            raise TypeError(f"question {name!r}: an 'answer_start' is not a whole number")


def find_pieces(places: list[pieces.Piece], start: int, end: int) -> tuple[int, int] | None:
    """First and last piece of text[start:end], or None if it has no piece."""
    first = bisect_right([place.end for place in places], start)
    last = bisect_left([place.start for place in places], end) - 1
    return (first, last) if first <= last else None


def answer_span(
    context: str, places: list[pieces.Piece], item: dict[str, Any], unanswerable: bool
) -> tuple[int, int]:
    """The pieces of a question's first answer, or (-1, -1) if it has none."""
    answers = [] if item.get("is_impossible") else item.get("answers", [])
    if not answers:
        if not unanswerable:
            raise BadQuestion(
                f"question {item['id']} has no answer; questions without one are in SQuAD 2.0: "
                "scripts/prepare.sh squad2"
            )
        return -1, -1
    for answer in answers:
        text, start = answer["text"], answer["answer_start"]
        if not text.strip() or context[start : start + len(text)] != text:
            raise BadQuestion(
                f"question {item['id']}: its context does not have the answer {text!r} at "
                f"character {start}"
            )
    text, start = answers[0]["text"], answers[0]["answer_start"]
    span = find_pieces(places, start, start + len(text))
    if span is None:
        raise BadQuestion(f"question {item['id']}: the answer {text!r} has no pieces")
    return span


_state: tuple[Any, bool] = (None, False)


def _start(vocab: str, lower: bool, unanswerable: bool) -> None:
    global _state
    _state = pieces.load(Path(vocab), lower), unanswerable


def _encode_paragraphs(paragraphs: list[dict[str, Any]]) -> list[Encoded]:
    encoder, unanswerable = _state
    lines = []
    for paragraph in paragraphs:
        context = paragraph["context"]
        places = encoder.locate(context)
        words = " ".join(place.piece for place in places)
        offsets = [[place.start, place.end] for place in places]
        for item in paragraph["qas"]:
            span = answer_span(context, places, item, unanswerable)
            impossible = item.get("is_impossible", False)
            example = {
                "id": item["id"],
                "context": context,
                "offsets": offsets,
                "answers": [] if impossible else [a["text"] for a in item.get("answers", [])],
            }
            lines.append(
                {
                    "question": " ".join(encoder.encode(item["question"])),
                    "context": words,
                    "spans": f"{span[0]} {span[1]}",
                    "examples": json.dumps(example, ensure_ascii=False),
                }
            )
    return lines


def _chunks(paragraphs: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(paragraphs), _PARAGRAPHS):
        yield paragraphs[start : start + _PARAGRAPHS]


def _encode_split(run: Run, data: QuestionSet, vocab: Path, path: Path, outputs: Result) -> Result:
    """Write the lines of a split; `outputs` are paths by the names in `Encoded`."""
    counts: Result = {"questions": 0, "answered": 0}
    setting = (str(vocab), not run.args.cased, data.unanswerable)
    chunks = _chunks(read_paragraphs(path))
    with contextlib.ExitStack() as files:
        streams = {
            name: files.enter_context(open(target, "w", encoding="utf-8", newline="\n"))
            for name, target in outputs.items()
        }
        try:
            for lines in ordered_map(_encode_paragraphs, chunks, run.workers, _start, setting):
                for line in lines:
                    counts["questions"] += 1
                    counts["answered"] += not line["spans"].startswith("-")
                    for name, stream in streams.items():
                        stream.write(line[name] + "\n")
        except BadQuestion as error:
            raise PrepareError(f"{path}: {error}") from error
    if not counts["questions"]:
        raise PrepareError(f"{path}: no questions in it")
    return counts


def _build(data: QuestionSet, run: Run, vocab: Path, folder: Path) -> Result:
    encoder = pieces.load(vocab, not run.args.cased)
    paths = run.sources.obtain(list(data.files.values()))
    pieces.keep(vocab, folder)
    scratch = folder / "scratch"
    scratch.mkdir()
    pieces.write_dict(encoder, scratch / "dict.txt")
    counts: Result = {}
    for split, wanted in data.files.items():
        outputs = {part: scratch / f"{split}.{part}" for part in PARTS}
        outputs["spans"] = folder / f"{split}.spans"
        if split != "train":  # what predictions need
            outputs["examples"] = folder / f"{split}.examples.jsonl"
        counts[split] = _encode_split(run, data, vocab, paths[wanted.name], outputs)
        run.expect(f"{split} questions", counts[split]["questions"], data.questions[split])
    dictionaries = dict.fromkeys(PARTS, scratch / "dict.txt")
    preprocess_parts(folder, scratch, dictionaries, list(data.files), run.workers)
    shutil.rmtree(scratch)
    return {"counts": counts, "dictionary": dictionary_size(folder / "question" / "dict.txt")}


def _report(result: Result) -> list[str]:
    lines = [
        f"{split}: {counts['questions']:,} questions, {counts['answered']:,} with an answer"
        for split, counts in result["counts"].items()
    ]
    return [*lines, f"{result['dictionary'] + 1:,} rows of the embedding, with <mask>"]


def main(name: str, argv: list[str] | None = None) -> int:
    """Prepare one of the sets; the exit code."""
    data = SETS[name]
    description = f"{data.title}: pieces and answers for the task squad."
    return pieces.run_set(name, description, data.files, partial(_build, data), _report, argv)
