"""Questions about paragraphs, SQuAD 1.1 and 2.0, as the data of the task squad: pieces of questions
and contexts, and the pieces that answer."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Dict, Iterator

from experiments.datasets import PrepareError, pieces
from experiments.datasets.binarize import dictionary_size, preprocess_parts
from experiments.datasets.cli import Result, Run
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import ordered_map

PARTS = ("question", "context")
_PARAGRAPHS = 200  # in a chunk
Encoded = Dict[str, str]  # a line for each file of a split


class BadQuestion(PrepareError):
    """A question whose answers do not fit its context."""


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

    def build(self, run: Run, folder: Path) -> Result:
        paths = list(run.sources.obtain(self.files(run)).values())
        vocab, _ = self.start(run, folder)
        scratch = folder / "scratch"
        counts: Result = {}
        for split, path, documented in zip(("train", "valid"), paths, self.questions):
            outputs = {part: scratch / f"{split}.{part}" for part in PARTS}
            outputs["spans"] = folder / f"{split}.spans"
            if split != "train":  # what predictions need
                outputs["examples"] = folder / f"{split}.examples.jsonl"
            counts[split] = self._encode_split(run, vocab, path, outputs)
            run.expect(f"{split} questions", counts[split]["questions"], documented)
        dictionaries = dict.fromkeys(PARTS, scratch / "dict.txt")
        preprocess_parts(folder, dictionaries, list(counts), run.workers)
        return {"counts": counts, "dictionary": dictionary_size(folder / "question" / "dict.txt")}

    def _encode_split(
        self, run: Run, vocab: Path, path: Path, outputs: dict[str, Path]
    ) -> dict[str, int]:
        """Write the lines of a split; `outputs` are paths by the names in `Encoded`."""
        counts = {"questions": 0, "answered": 0}
        setting = (str(vocab), not run.args.cased, self.unanswerable)
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

    def report(self, result: Result) -> list[str]:
        lines = [
            f"{split}: {counts['questions']:,} questions, {counts['answered']:,} with an answer"
            for split, counts in result["counts"].items()
        ]
        return [*lines, f"{result['dictionary'] + 1:,} rows of the embedding, with <mask>"]


SETS = {
    "squad1": QuestionSet("SQuAD 1.1", (87599, 10570), unanswerable=False),
    "squad2": QuestionSet("SQuAD 2.0", (130319, 11873), unanswerable=True),
}
