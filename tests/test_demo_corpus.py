"""The demo's corpus: the same bytes everywhere, disjoint splits, Zipf frequencies, and grammar that
holds in the sentences (agreement, case, word order, translation by object)."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from fairseq_dpq.demo import corpus
from fairseq_dpq.demo.grammar import DETERMINERS, Grammar
from fairseq_dpq.demo.lexicon import NUMBERS, Dice, Zipf, build_lexicon

SIZES = {"train": 400, "valid": 50, "test": 50}


@pytest.fixture(scope="module")
def lexicon():
    return build_lexicon(1)


@pytest.fixture(scope="module")
def pairs(lexicon):
    grammar, dice = Grammar(lexicon), Dice(7)
    return [grammar.pair(dice) for _ in range(2000)]


def clauses(sentence: str, conjunction: str) -> list[list[str]]:
    """The words of each clause, without the full stop."""
    assert sentence.endswith(" .")
    return [part.split() for part in sentence[:-2].split(f" {conjunction} ")]


def test_same_bytes_on_every_machine() -> None:
    text = repr(sorted(corpus.generate(1, SIZES).items())).encode()
    digest = hashlib.sha256(text).hexdigest()
    assert digest == "a872814fe59e3f6d03b7dcc515e2988179d0ab7cd21553eec23402d83a09c68a", (
        "the corpus changed: figures in README and docs change with it"
    )


def test_seeds_differ() -> None:
    one, two = (corpus.generate(seed, SIZES) for seed in (1, 2))
    shared = {source for source, _ in one["train"]} & {source for source, _ in two["train"]}
    assert not shared


def test_more_training_data_leaves_the_rest_as_it_is() -> None:
    small = corpus.generate(3, SIZES)
    large = corpus.generate(3, {**SIZES, "train": 800})
    assert {split: len(small[split]) for split in SIZES} == SIZES
    assert small["test"] == large["test"]
    assert small["valid"] == large["valid"]
    assert small["train"] == large["train"][:400]


def test_splits_are_disjoint() -> None:
    # so large that the grammar says 9 of these sentences again unless it is stopped
    drawn = corpus.generate(1, {"train": 20000, "valid": 2000, "test": 2000})
    test, valid, train = ({source for source, _ in drawn[split]} for split in corpus.SPLITS)
    assert not test & valid
    assert not (test | valid) & train


def test_unknown_split_or_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"sizes\['dev'\] = 5"):
        corpus.generate(1, {"dev": 5})
    with pytest.raises(ValueError, match=r"sizes\['train'\] = -1"):
        corpus.generate(1, {"train": -1})


def test_lexicon_has_several_thousand_distinct_forms(lexicon) -> None:
    source, target = lexicon.types()
    # 12 x 60 nouns and 100 names in 4 forms, 160 verbs in 6, 16 + 12 x 12 adjectives in 2
    assert len(source) == (720 + 100) * 4 + 160 * 6 + 160 * 2
    # nouns and names in 2, verbs in 6 (and a second stem for some), adjectives in 4
    second = sum(verb.target != verb.target_other for verb in lexicon.verbs.items)
    assert second > 20
    assert len(target) == (720 + 100) * 2 + (160 + second) * 6 + 160 * 4


def test_zipf_weights() -> None:
    draws = Counter()
    dice, zipf = Dice(5), Zipf(range(50), shift=3.0)
    for _ in range(40000):
        draws[zipf.draw(dice)] += 1
    total = sum(1 / (rank + 3) for rank in range(50))
    for rank in (0, 1, 9, 49):
        expected = 40000 / (rank + 3) / total
        assert abs(draws[rank] - expected) < 4 * expected**0.5


def test_target_modifiers_agree(lexicon, pairs) -> None:
    nouns = {
        noun.target[number]: (noun.gender, number)
        for group in (*lexicon.nouns.values(), lexicon.names)
        for noun in group.items
        for number in NUMBERS
    }
    modifiers = {
        form: key
        for group in lexicon.adjectives.values()
        for adjective in group.items
        for key, form in adjective.target.items()
    }
    keys = [(gender, number) for gender in (0, 1) for number in NUMBERS]
    for _, forms in DETERMINERS:
        modifiers.update((form, key) for key, form in zip(keys, forms) if form)
    checked: Counter[tuple[int, str]] = Counter()
    for _, target in pairs:
        agreement = None
        for word in target.split():
            if word in nouns:
                agreement = nouns[word]
            elif word in modifiers:
                assert modifiers[word] == agreement, (word, target)
                checked[agreement] += 1
    assert all(checked[key] > 200 for key in keys), checked


def test_target_verb_comes_last_and_source_case_marks_the_object(lexicon, pairs) -> None:
    target_verbs = {
        form
        for verb in lexicon.verbs.items
        for forms in (verb.target, verb.target_other)
        for form in forms.values()
    }
    source_verbs = {form for verb in lexicon.verbs.items for form in verb.source.values()}
    case = {
        form: key[0]
        for group in (*lexicon.nouns.values(), lexicon.names)
        for noun in group.items
        for key, form in noun.source.items()
    }
    object_first = plain = 0
    for source, target in pairs:
        for words in clauses(target, "zha"):
            assert (words[-2] if words[-1] == "nakh" else words[-1]) in target_verbs
        for words in clauses(source, "ni"):
            if "ke" in words:
                continue
            verb = next(at for at, word in enumerate(words) if word in source_verbs)
            before = [case[word] for word in words[:verb] if word in case]
            assert len(before) == 1
            object_first += before == ["object"]
            plain += before == ["subject"]
    # 25 % of the clauses that have an object; 6 of 8 frames have one
    assert 0.13 < object_first / (object_first + plain) < 0.25


def test_object_decides_the_translation_of_some_verbs(lexicon) -> None:
    grammar, dice = Grammar(lexicon), Dice(11)
    seen: Counter[bool] = Counter()
    for _ in range(3000):
        clause = grammar._clause(dice)
        if clause.object is None or clause.verb.target == clause.verb.target_other:
            continue
        other = clause.object.noun.kind in clause.verb.other_objects
        forms = clause.verb.target_other if other else clause.verb.target
        verb = [word for word in grammar._target(clause) if word != "nakh"][-1]
        assert verb == forms[clause.tense, clause.subject.number]
        seen[other] += 1
    assert min(seen[True], seen[False]) > 100


def test_command_line_writes_whole_files(tmp_path: Path, capsys) -> None:
    corpus.main(
        [str(tmp_path / "c"), "--seed", "4", "--train", "30", "--valid", "5", "--test", "6"]
    )
    names = {f"{split}.{side}" for split in SIZES for side in ("xa", "xb")}
    assert {path.name for path in (tmp_path / "c").iterdir()} == names
    for split, size in (("train", 30), ("valid", 5), ("test", 6)):
        for side, at in (("xa", 0), ("xb", 1)):
            lines = (tmp_path / "c" / f"{split}.{side}").read_text().splitlines()
            expected = corpus.generate(4, {"train": 30, "valid": 5, "test": 6})[split]
            assert lines == [pair[at] for pair in expected]
            assert len(lines) == size
    assert "train: 30 sentences" in capsys.readouterr().out


def test_command_line_refuses_an_empty_split(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        corpus.main([str(tmp_path), "--train", "0"])
    assert "--train: 0: needs at least 1 sentence" in capsys.readouterr().err
