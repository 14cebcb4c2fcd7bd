"""experiments.score: BLEU worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import score


def test_score_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, running, tokenized = (tmp_path / name for name in ("out", "detok", "tok"))
    # Out of order, a second best, and a line that is no translation.
    out.write_text("D-1\t-1\tg h i j\nH-0\t-1\tx\nD-0\t-1\ta b c d , e\nD-0\t-2\tq q\n")
    tokenized.write_text("a b c d , f\ng h i j\n")
    running.write_text("a b c d, f\ng h i j\n")
    argv = ["bleu", "--output", str(out), "--reference", str(running)]
    argv += ["--tokenized-reference", str(tokenized)]
    assert score.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    # Matches of 1 to 4 words: 9/10, 7/8, 5/6, 3/4.
    expected = 100 * (9 / 10 * 7 / 8 * 5 / 6 * 3 / 4) ** 0.25
    assert [found["BLEU"], found["tokenised_BLEU"]] == [pytest.approx(expected, abs=1e-4)] * 2
    assert "tok:13a" in found["signature"] and "tok:none" in found["tokenised_signature"]

    # An unknown word is left out of running text, and a wrong word among tokens.
    out.write_text("D-1\t-1\tg h i j\nD-0\t-1\ta b c d <unk> ,\n")
    running.write_text("a b c d,\ng h i j\n")
    tokenized.write_text("a b c d f ,\ng h i j\n")
    assert score.main(argv) == 0
    expected = 100 * (9 / 10 * 6 / 8 * 4 / 6 * 2 / 4) ** 0.25
    found = json.loads(capsys.readouterr().out)
    assert found["BLEU"] == pytest.approx(100)
    assert found["tokenised_BLEU"] == pytest.approx(expected, abs=1e-4)

    running.write_text("a b c d, f\n")
    assert score.main(argv[:5]) == 2
    assert "2 translations, but 1 reference lines" in capsys.readouterr().err
    out.write_text("D-1\t-1\tg h i j\n")
    assert score.main(argv[:5]) == 2
    assert "no translation of sentence 0" in capsys.readouterr().err
