"""From a trained model to answers, and the scores of SQuAD: exact match and F1."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence

import torch

from .squad import span_logits

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


@dataclass(frozen=True)
class Window:
    """A part of a context with the logits of its pieces, and those of the null answer."""

    first: int  # its first piece in the context
    starts: Sequence[float]
    ends: Sequence[float]
    null: float  # start + end logit of <s>


@dataclass(frozen=True)
class Answer:
    """A text with its score: start + end logit, or, among the n best, a probability."""

    text: str
    score: float


def best_window(position: int, windows: Sequence[Window]) -> int:
    """The window that shows most context on both sides of a piece; the first of equal ones."""
    best, found = -math.inf, -1
    for number, window in enumerate(windows):
        length = len(window.starts)
        left, right = position - window.first, window.first + length - 1 - position
        if left >= 0 and right >= 0 and min(left, right) + 0.01 * length > best:
            best, found = min(left, right) + 0.01 * length, number
    return found


def n_best(
    context: str,
    offsets: Sequence[Sequence[int]],
    windows: Sequence[Window],
    n: int = 20,
    longest: int = 30,
) -> list[Answer]:
    """The best spans as texts of the context, best first; equal texts count once.

    A span counts only in the window that shows most context around its first piece.
    """
    found: list[tuple[float, int, int]] = []
    for number, window in enumerate(windows):
        starts, ends = _largest(window.starts, n), _largest(window.ends, n)
        for start in starts:
            if best_window(window.first + start, windows) != number:
                continue
            for end in ends:
                if start <= end < start + longest:
                    score = window.starts[start] + window.ends[end]
                    found.append((score, window.first + start, window.first + end))
    found.sort(key=lambda item: (-item[0], item[1], item[2]))
    answers: dict[str, float] = {}
    for score, first, last in found:
        text = context[offsets[first][0] : offsets[last][1]]
        answers.setdefault(text, score)
        if len(answers) == n:
            break
    return [Answer(text, score) for text, score in answers.items()]


def _largest(values: Sequence[float], n: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:n]


def null_odds(windows: Sequence[Window], answers: Sequence[Answer]) -> float:
    """How much the null answer scores above the best span; infinite if there is no span."""
    if not answers:
        return math.inf
    return min(window.null for window in windows) - answers[0].score


def probabilities(answers: Sequence[Answer]) -> list[Answer]:
    """The n best with softmax probabilities."""
    top = max((answer.score for answer in answers), default=0.0)
    weights = [math.exp(answer.score - top) for answer in answers]
    return [Answer(a.text, w / sum(weights)) for a, w in zip(answers, weights)]


# ---- answers of a model ----


@dataclass(frozen=True)
class Prediction:
    """The n best spans of a question, and how much the null answer scores above the best."""

    id: str
    answers: list[Answer]
    odds: float
    golds: list[str]

    def text(self, threshold: float | None) -> str:
        """The answer; with a threshold, none where the null answer is that much better."""
        if not self.answers or (threshold is not None and self.odds > threshold):
            return ""
        return self.answers[0].text


def read_examples(path: Path) -> Iterator[dict[str, Any]]:
    """The questions of a split, in its order."""
    with open(path, encoding="utf-8", newline="\n") as stream:
        for line in stream:
            yield json.loads(line)


@torch.no_grad()
def _windows(model: Any, dataset: Any, batch_size: int, device: torch.device) -> Iterator[Window]:
    """The logits of every window of a split, in its order."""
    for start in range(0, len(dataset), batch_size):
        items = [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
        batch = dataset.collater(items)
        batch["net_input"] = {k: v.to(device) for k, v in batch["net_input"].items()}
        logits = span_logits(model, batch, dataset.pad).cpu()  # (batch, length, 2)
        for row, (place, shown) in enumerate(batch["context"].tolist()):
            part = logits[row, place : place + shown]
            yield Window(
                first=dataset.windows[start + row][1],
                starts=part[:, 0].tolist(),
                ends=part[:, 1].tolist(),
                null=float(logits[row, 0].sum()),
            )


def predict(
    model: Any,
    task: Any,
    subset: str = "valid",
    n: int = 20,
    longest: int = 30,
    batch_size: int = 16,
    device: str = "cpu",
) -> Iterator[Prediction]:
    """Answers to all questions of a split of the task's data."""
    where = torch.device(device)
    model = model.to(where).eval()
    task.load_dataset(subset)
    dataset = task.dataset(subset)
    found = _windows(model, dataset, batch_size, where)
    number = 0
    for example, item in enumerate(read_examples(Path(task.cfg.data) / f"{subset}.examples.jsonl")):
        windows = []
        while number < len(dataset) and dataset.windows[number][0] == example:
            windows.append(next(found))
            number += 1
        answers = n_best(item["context"], item["offsets"], windows, n, longest)
        yield Prediction(item["id"], answers, null_odds(windows, answers), item["answers"])


# ---- scores ----


def normalize(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    text = "".join(char for char in text.lower() if char not in _PUNCTUATION)
    return _ARTICLES.sub(" ", text).split()


def exact_match(prediction: str, gold: str) -> float:
    """1 if both are the same words, else 0."""
    return float(normalize(prediction) == normalize(gold))


def f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall of words; without words on a side: 1 if on both."""
    ours, theirs = normalize(prediction), normalize(gold)
    if not ours or not theirs:
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs))


def score_question(prediction: str, golds: Sequence[str]) -> tuple[float, float]:
    """(exact match, F1) of a prediction: the best over the gold answers, "" if there is none."""
    texts = [gold for gold in golds if normalize(gold)] or [""]
    return max(exact_match(prediction, g) for g in texts), max(f1(prediction, g) for g in texts)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return 100 * sum(found) / len(found)


def score(predictions: Mapping[str, str], golds: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent; with unanswerable questions also of each kind."""
    scores = {name: score_question(predictions[name], texts) for name, texts in golds.items()}
    kinds = {"": list(golds)}
    answerable = [name for name, texts in golds.items() if texts]
    if len(answerable) < len(golds):
        others = [name for name, texts in golds.items() if not texts]
        kinds.update({"answerable_": answerable, "unanswerable_": others})
    out = {}
    for kind, names in kinds.items():
        if names:
            out[f"{kind}exact_match"] = _mean(scores[name][0] for name in names)
            out[f"{kind}f1"] = _mean(scores[name][1] for name in names)
    return out


def best_threshold(
    spans: Mapping[str, str], odds: Mapping[str, float], golds: Mapping[str, Sequence[str]]
) -> tuple[float, float]:
    """(F1 in percent, threshold) of the best null threshold on these very questions.

    `spans` are the best answers that are not null. A question is left unanswered if its odds are
    above the threshold.
    """
    empty = {name: score_question("", texts)[1] for name, texts in golds.items()}
    total = sum(empty.values())  # threshold: below all odds
    names = sorted(golds, key=lambda name: odds[name])
    # A number, not minus infinity, so that it can be given on a command line.
    lowest = min((value for value in odds.values() if math.isfinite(value)), default=0.0)
    best, threshold = total, math.floor(lowest) - 1.0
    for number, name in enumerate(names):
        total += score_question(spans[name], golds[name])[1] - empty[name]
        following = odds[names[number + 1]] if number + 1 < len(names) else None
        if total > best and following != odds[name]:
            best, threshold = total, odds[name]
    return 100 * best / len(golds), threshold
