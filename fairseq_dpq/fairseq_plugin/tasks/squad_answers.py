"""From a trained model to answers, and the scores of SQuAD: exact match and F1."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from heapq import nlargest
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch

from .squad import span_logits

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


class Window(NamedTuple):
    """A part of a context with the logits of its pieces, and those of the null answer."""

    first: int  # its first piece in the context
    starts: Sequence[float]
    ends: Sequence[float]
    null: float  # start + end logit of <s>


class Answer(NamedTuple):
    """A text with its score: start + end logit, or, among the n best, a probability."""

    text: str
    score: float


def best_window(position: int, windows: Sequence[Window]) -> int:
    """The window that shows most context on both sides of a piece; the first of equal ones."""

    def context(number: int) -> float:
        first, length = windows[number].first, len(windows[number].starts)
        least = min(position - first, first + length - 1 - position)
        return least + 0.01 * length if least >= 0 else -math.inf

    return max(range(len(windows)), key=context)


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
        starts, ends = (
            nlargest(n, range(len(logits)), key=logits.__getitem__)
            for logits in (window.starts, window.ends)
        )
        for start in starts:
            if best_window(window.first + start, windows) != number:
                continue
            for end in ends:
                if start <= end < start + longest:
                    score = window.starts[start] + window.ends[end]
                    found.append((score, window.first + start, window.first + end))
    answers: dict[str, float] = {}
    for score, first, last in sorted(found, key=lambda item: (-item[0], item[1], item[2])):
        answers.setdefault(context[offsets[first][0] : offsets[last][1]], score)
    return [Answer(text, score) for text, score in islice(answers.items(), n)]


def null_odds(windows: Sequence[Window], answers: Sequence[Answer]) -> float:
    """How much the null answer scores above the best span; infinite if there is no span."""
    if not answers:
        return math.inf
    return min(window.null for window in windows) - answers[0].score


def probabilities(answers: Sequence[Answer]) -> list[Answer]:
    """The n best with softmax probabilities."""
    scores = torch.tensor([answer.score for answer in answers], dtype=torch.float64)
    return [Answer(a.text, share) for a, share in zip(answers, scores.softmax(0).tolist())]


# ---- answers of a model ----


class Prediction(NamedTuple):
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


@torch.no_grad()
def _windows(
    model: Any, dataset: Any, batch_size: int, device: torch.device
) -> Iterator[tuple[int, Window]]:
    """The logits of every window of a split, in its order, with the number of its question."""
    for start in range(0, len(dataset), batch_size):
        places = range(start, min(start + batch_size, len(dataset)))
        batch = dataset.collater([dataset[i] for i in places])
        batch["net_input"] = {k: v.to(device) for k, v in batch["net_input"].items()}
        logits = span_logits(model, batch, dataset.pad).cpu()  # (batch, length, 2)
        for index, row, (place, shown) in zip(places, logits, batch["context"].tolist()):
            example, first, _ = dataset.windows[index]
            starts, ends = row[place : place + shown].T.tolist()
            yield example, Window(first, starts, ends, null=float(row[0].sum()))


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
    task.load_dataset(subset)
    found = _windows(model.to(where).eval(), task.dataset(subset), batch_size, where)
    with open(Path(task.cfg.data) / f"{subset}.examples.jsonl", encoding="utf-8") as lines:
        for line, (_, group) in zip(lines, groupby(found, key=lambda pair: pair[0])):
            item, windows = json.loads(line), [window for _, window in group]
            answers = n_best(item["context"], item["offsets"], windows, n, longest)
            yield Prediction(item["id"], answers, null_odds(windows, answers), item["answers"])


# ---- scores ----


def normalize(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    text = "".join(char for char in text.lower() if char not in _PUNCTUATION)
    return _ARTICLES.sub(" ", text).split()


def _overlap(ours: list[str], theirs: list[str]) -> float:
    """Harmonic mean of precision and recall of words; without words on a side: 1 if on both."""
    if not ours or not theirs:
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs))


def score_question(prediction: str, golds: Sequence[str]) -> tuple[float, float]:
    """(exact match, F1) of a prediction: the best over the gold answers, "" if there is none."""
    ours = normalize(prediction)
    texts = [words for words in map(normalize, golds) if words] or [[]]
    return float(ours in texts), max(_overlap(ours, words) for words in texts)


def score(predictions: Mapping[str, str], golds: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent; with unanswerable questions also of each kind."""
    kinds = {"": golds}
    answerable = {name: texts for name, texts in golds.items() if texts}
    if len(answerable) < len(golds):
        others = {name: texts for name, texts in golds.items() if not texts}
        kinds.update({"answerable_": answerable, "unanswerable_": others})
    out = {}
    for kind, chosen in kinds.items():
        found = [score_question(predictions[name], texts) for name, texts in chosen.items()]
        for measure, values in zip(("exact_match", "f1"), zip(*found)):
            out[kind + measure] = 100 * sum(values) / len(values)
    return out


def best_threshold(found: Sequence[Prediction]) -> tuple[float, float]:
    """(F1 in percent, threshold) of the best null threshold on these very questions. A question is
    left unanswered if its odds are above the threshold."""
    ranked = sorted(found, key=lambda p: p.odds)
    empty = [score_question("", p.golds)[1] for p in ranked]
    total = sum(empty)  # threshold: below all odds
    # A number, not minus infinity, so that it can be given on a command line.
    lowest = ranked[0].odds if math.isfinite(ranked[0].odds) else 0.0
    best, threshold = total, math.floor(lowest) - 1.0
    for p, without, following in zip(ranked, empty, [*ranked[1:], None]):
        total += score_question(p.text(None), p.golds)[1] - without
        if total > best and (following is None or following.odds != p.odds):
            best, threshold = total, p.odds
    return 100 * best / len(found), threshold
