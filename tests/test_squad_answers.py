"""Exact match, F1, n-best and null scores of SQuAD, worked by hand."""

from __future__ import annotations

import math

import pytest

from fairseq_dpq.fairseq_plugin.tasks.squad_answers import (
    Answer,
    Prediction,
    Window,
    best_threshold,
    best_window,
    n_best,
    normalize,
    null_odds,
    probabilities,
    score,
    score_question,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The  U.S. Army's", "us armys"),
        ("an apple, a pear", "apple pear"),
        ("theatre", "theatre"),  # an article only as a word
        ("A.D. 70", "ad 70"),
        ("a-b", "ab"),
        (
            "caf\u00e9 \u2013 \u201ctea\u201d",
            "caf\u00e9 \u2013 \u201ctea\u201d",
        ),  # ASCII signs only
        ("the", ""),
    ],
)
def test_normalisation(text: str, words: str) -> None:
    assert " ".join(normalize(text)) == words


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "overlap"),
    [
        ("The Denver Broncos!", "denver broncos", 1, 1),
        ("Denver", "Denver Broncos", 0, 2 / 3),  # precision 1, recall 1/2
        ("the big red dog", "red dogs", 0, 2 / 5),  # one of 3, one of 2
        ("a b b c", "b b b d", 0, 4 / 7),  # `a` is an article: b b c; two b in common
        ("x", "y", 0, 0),
        ("", "y", 0, 0),
        ("y", "", 0, 0),
        ("", "", 1, 1),
    ],
)
def test_exact_match_and_f1(prediction: str, gold: str, exact: float, overlap: float) -> None:
    assert score_question(prediction, [gold]) == (exact, pytest.approx(overlap))


def test_best_gold_answer_counts() -> None:
    assert score_question("two dogs", ["dogs", "two dogs", "three"]) == (1, 1)
    assert score_question("two dogs", ["dogs", "three"]) == (0, pytest.approx(2 / 3))
    assert score_question("", []) == (1, 1)  # unanswerable
    assert score_question("dogs", []) == (0, 0)
    assert score_question("dogs", ["the", "dogs"]) == (1, 1)  # a gold without words is ignored


def test_scores_are_means_in_percent() -> None:
    golds = {"1": ["red dog"], "2": ["cat"], "3": [], "4": []}
    predictions = {"1": "dog", "2": "cat", "3": "", "4": "cat"}
    found = score(predictions, golds)
    assert found["exact_match"] == 50
    assert found["f1"] == pytest.approx(100 * (2 / 3 + 1 + 1 + 0) / 4)
    assert found["answerable_exact_match"] == 50
    assert found["answerable_f1"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert found["unanswerable_f1"] == 50
    assert set(score({"1": "dog"}, {"1": ["dog"]})) == {"exact_match", "f1"}


CONTEXT = "alpha beta gamma delta"
OFFSETS = [[0, 5], [6, 10], [11, 16], [17, 22]]


def test_spans_of_one_window() -> None:
    window = Window(0, starts=[1.0, 5.0, 0.0, 2.0], ends=[4.0, 0.5, 3.0, 1.0], null=2.0)
    answers = n_best(CONTEXT, OFFSETS, [window], n=4, longest=2)
    # beta..gamma 8; beta 5.5; alpha 5 (start 1 + end 4); gamma..., an end before its start is none
    assert answers[:3] == [Answer("beta gamma", 8.0), Answer("beta", 5.5), Answer("alpha", 5.0)]
    assert "beta gamma delta" not in [answer.text for answer in answers]  # three pieces
    assert null_odds([window], answers) == 2.0 - 8.0
    assert [a.text for a in n_best(CONTEXT, OFFSETS, [window], n=1, longest=30)] == []
    assert null_odds([window], []) == math.inf


def test_pieces_count_in_the_window_with_most_context() -> None:
    first = Window(0, starts=[-1, 0, 9], ends=[0, 0, 9], null=1.0)
    second = Window(1, starts=[7, 3, 0], ends=[0, 4, 0], null=-1.0)
    # gamma is the edge of the first window and the middle of the second one, beta vice versa
    assert [best_window(i, [first, second]) for i in range(4)] == [0, 0, 1, 1]
    answers = n_best(CONTEXT, OFFSETS, [first, second], n=9, longest=30)
    assert answers[0] == Answer("beta gamma", 9.0)  # of the first: 0 + 9, not 7 + 4
    assert Answer("gamma", 7.0) in answers  # of the second: 3 + 4, not 9 + 9
    assert null_odds([first, second], answers) == -1.0 - 9.0


def test_equal_texts_count_once() -> None:
    window = Window(0, starts=[2.0, 0.0, 1.0], ends=[2.0, 0.0, 1.0], null=0.0)
    answers = n_best("ha da ha", [[0, 2], [3, 5], [6, 8]], [window], n=3, longest=1)
    assert answers == [Answer("ha", 4.0), Answer("da", 0.0)]


def test_probabilities_sum_to_one() -> None:
    found = probabilities([Answer("a", math.log(3.0)), Answer("b", 0.0)])
    assert [answer.score for answer in found] == pytest.approx([0.75, 0.25])
    assert probabilities([]) == []


def test_best_threshold() -> None:
    golds = {"1": ["a b"], "3": ["c"], "2": [], "4": []}
    spans = {"1": "b", "2": "x", "3": "c", "4": "y"}

    def best(odds: list[float], golds: dict[str, list[str]]) -> tuple[float, float]:
        pairs = zip(golds, odds)
        return best_threshold(
            [Prediction(name, [Answer(spans[name], 0.0)], x, golds[name]) for name, x in pairs]
        )

    # Answered: none 2 of 4; 1: 3 (`a` is an article, so `b` is right); 1, 3: 4; then 2 is lost
    assert best([-3.0, -1.0, 0.5, 2.0], golds) == (100.0, -1.0)
    assert best([-3.0, 0.5, 0.5, 2.0], golds) == (75.0, -3.0)  # 3 cannot be answered without 2
    # Best never to answer: a number below all odds, which a command line takes.
    assert best([-3.0, -1.0, 0.5, 2.0], {name: [] for name in golds}) == (100.0, -4.0)
