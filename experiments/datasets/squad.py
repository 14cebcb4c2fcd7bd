"""Questions about paragraphs, SQuAD 1.1 and 2.0, as the data of the task squad: pieces of questions
and contexts, and the pieces that answer."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Dict, List

from experiments.datasets import PrepareError, pieces
from experiments.datasets.binarize import dictionary_size, preprocess_parts
from experiments.datasets.cli import Run
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import LineWriter, chunked, ordered_map, read_lines

PARTS = ("question", "context")
_PARAGRAPHS = 200  # in a chunk
Paragraphs = List[Dict[str, Any]]


def read_paragraphs(path: Path) -> Paragraphs:
    """All paragraphs with their questions, which have the fields that are read later."""
    try:
        data = json.loads("".join(read_lines(path)))
        paragraphs = [p for article in data["data"] for p in article["paragraphs"]]
        for paragraph in paragraphs:
            _check("a context", paragraph["context"], str)
            for item in paragraph["qas"]:
                for key in ("id", "question"):
                    _check(f"question {item['id']!r}: {key!r}", item[key], str)
                for answer in item.get("answers", []):
                    _check(f"question {item['id']!r}: 'text'", answer["text"], str)
                    _check(f"question {item['id']!r}: 'answer_start'", answer["answer_start"], int)
    except json.JSONDecodeError as error:
        raise PrepareError(f"{path}: not JSON ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PrepareError(f"{path}: not a SQuAD file: {what}") from error
    return paragraphs


def _check(name: str, value: Any, kind: type) -> None:
    if type(value) is not kind:  # a bool is no number
        raise TypeError(f"{name} is not of type {kind.__name__}")


def find_pieces(places: list[pieces.Piece], start: int, end: int) -> tuple[int, int] | None:
    """First and last piece of text[start:end], or None if it has no piece."""
    first = bisect_right([place.end for place in places], start)
    last = bisect_left([place.start for place in places], end) - 1
    return (first, last) if first <= last else None


def answer_span(
    context: str, places: list[pieces.Piece], name: str, answers: Paragraphs, unanswerable: bool
) -> tuple[int, int]:
    """The pieces of a question's first answer, or (-1, -1) if it has none."""
    if not answers and not unanswerable:
        raise PrepareError(
            f"{name} has no answer; questions without one are in SQuAD 2.0: scripts/prepare.sh "
            "squad2"
        )
    spans = []
    for answer in answers:
        text, start = answer["text"], answer["answer_start"]
        if not text.strip() or context[start : start + len(text)] != text:
            raise PrepareError(
                f"{name}: its context does not have the answer {text!r} at character {start}"
            )
        spans.append(find_pieces(places, start, start + len(text)))
    span = spans[0] if spans else (-1, -1)
    if span is None:
        raise PrepareError(f"{name}: the answer {answers[0]['text']!r} has no pieces")
    return span


def _encode_paragraphs(
    encoder: Any, paragraphs: Paragraphs, path: Path, unanswerable: bool
) -> list[tuple[str, str, str, str]]:
    """Question, context, answer and example of each question: a line for each file of a split."""
    lines = []
    for paragraph in paragraphs:
        context = paragraph["context"]
        places = encoder.locate(context)
        words = " ".join(place.piece for place in places)
        offsets = [[place.start, place.end] for place in places]
        for item in paragraph["qas"]:
            answers = [] if item.get("is_impossible") else item.get("answers", [])
            name = f"{path}: question {item['id']}"
            span = answer_span(context, places, name, answers, unanswerable)
            texts = [answer["text"] for answer in answers]
            example = {"id": item["id"], "context": context, "offsets": offsets, "answers": texts}
            question = " ".join(encoder.encode(item["question"]))
            found = json.dumps(example, ensure_ascii=False)
            lines.append((question, words, f"{span[0]} {span[1]}", found))
    return lines


@dataclass(frozen=True)
class QuestionSet(pieces.PieceSet):
    """A version of SQuAD: its questions in train and valid, whether some have no answer."""

    description: ClassVar[str] = "{}: pieces and answers for the task squad."
    title: str
    questions: tuple[int, int]
    unanswerable: bool

    def files(self, run: Run) -> list[RequiredFile]:
        version = self.title.split()[1]
        return [required(run.name, f"{split}-v{version}.json") for split in ("train", "dev")]

    def build(self, run: Run, folder: Path) -> list[str]:
        paths = run.sources.obtain(self.files(run)).values()
        vocab, scratch = self.start(run, folder), folder / "scratch"
        report = []
        for split, path, documented in zip(("train", "valid"), paths, self.questions):
            encode = partial(_encode_paragraphs, path=path, unanswerable=self.unanswerable)
            chunks = chunked(read_paragraphs(path), _PARAGRAPHS)
            # Examples are what predictions need.
            kept = ("spans", "examples.jsonl") if split != "train" else ("spans",)
            questions = answered = 0
            with LineWriter(scratch / split, (*PARTS, *kept)) as writer:
                for lines in ordered_map(
                    encode, chunks, run.workers, pieces.load, vocab, not run.args.cased
                ):
                    for line in lines:
                        writer.write(*line)
                        questions += 1
                        answered += not line[2].startswith("-")
            if not questions:
                raise PrepareError(f"{path}: no questions in it")
            run.expect(f"{split} questions", questions, documented)
            report.append(f"{split}: {questions:,} questions, {answered:,} with an answer")
            for ending in kept:
                (scratch / f"{split}.{ending}").rename(folder / f"{split}.{ending}")
        dictionaries = dict.fromkeys(PARTS, scratch / "dict.txt")
        preprocess_parts(folder, dictionaries, ("train", "valid"), run.workers)
        rows = dictionary_size(folder / "question" / "dict.txt") + 1
        return [*report, f"{rows:,} rows of the embedding, with <mask>"]


SETS = {
    "squad1": QuestionSet("SQuAD 1.1", (87599, 10570), unanswerable=False),
    "squad2": QuestionSet("SQuAD 2.0", (130319, 11873), unanswerable=True),
}
