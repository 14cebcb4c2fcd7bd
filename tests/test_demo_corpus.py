"""The demo's corpus: the same bytes everywhere, disjoint splits, Zipf frequencies, and forms and
sentences that were worked out by hand."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from experiments.demo import corpus
from experiments.demo.grammar import Clause, Grammar, Phrase, _english, _german
from experiments.demo.lexicon import CASES, Dice, Lexicon, Noun, Verb, Zipf, build_lexicon

SIZES = {"train": 400, "valid": 50, "test": 50}


@pytest.fixture(scope="module")
def lexicon():
    return build_lexicon(1)


def noun(lexicon: Lexicon, word: str) -> Noun:
    return next(n for z in lexicon.nouns.values() for n in z.items if n.english[0] == word)


def verb(lexicon: Lexicon, word: str) -> Verb:
    return next(v for v in lexicon.verbs.items if v.english[0] == word)


def test_same_bytes_on_every_machine() -> None:
    text = repr(sorted(corpus.generate(1, SIZES).items())).encode()
    digest = hashlib.sha256(text).hexdigest()
    assert digest == "5922157e9e6f0c20e5c4926c9a5653b71c653d3f0f31fc3b6d28451e5d103b5e", (
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
    # so large that the grammar says 6 of these sentences again unless it is stopped
    drawn = corpus.generate(1, {"train": 20000, "valid": 2000, "test": 2000})
    test, valid, train = ({source for source, _ in drawn[split]} for split in corpus.SPLITS)
    assert not test & valid
    assert not (test | valid) & train


def test_there_are_more_than_a_thousand_forms(lexicon) -> None:
    drawn = corpus.generate(1, {"train": 20000, "valid": 1, "test": 1})["train"]
    english, german = ({word for pair in drawn for word in pair[at].split()} for at in (0, 1))
    assert 1400 < len(english) < 1700 and 1600 < len(german) < 2000
    assert {"horse", "horses", "horse's", "horses'"} < english and {"Pferd", "Pferdes"} < german
    counts = {kind: len(nouns.items) for kind, nouns in lexicon.nouns.items()}
    assert len(counts) == 12 and sum(counts.values()) > 200 and len(lexicon.verbs.items) > 75
    for nouns in lexicon.nouns.values():
        names = [n.english[0] for n in nouns.items]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("word", "english", "german"),
    [
        ("horse", "horse horses horse's horses'", "Pferd Pferd Pferd Pferdes Pferde Pferden"),
        ("man", "man men man's men's", "Mann Mann Mann Mannes Männer Männern"),
        ("mouse", "mouse mice mouse's mice's", "Maus Maus Maus Maus Mäuse Mäusen"),
        ("lion", "lion lions lion's lions'", "Löwe Löwen Löwen Löwen Löwen Löwen"),
        ("soldier", "soldier soldiers soldier's soldiers'", "Soldat " + "Soldaten " * 5),
        ("lake", "lake lakes lake's lakes'", "See See See Sees Seen Seen"),
        ("car", "car cars car's cars'", "Auto Auto Auto Autos Autos Autos"),
        ("cherry", "cherry cherries cherry's cherries'", "Kirsche " * 4 + "Kirschen Kirschen"),
        ("house", "house houses house's houses'", "Haus Haus Haus Hauses Häuser Häusern"),
    ],
)
def test_forms_of_nouns(lexicon, word: str, english: str, german: str) -> None:
    found = noun(lexicon, word)
    assert [*found.english, *found.possessive] == english.split()
    forms = [found.german[case, 0] for case in CASES]
    assert [*forms, found.german["nominative", 1], found.german["dative", 1]] == german.split()


@pytest.mark.parametrize(
    ("word", "english", "german"),
    [
        ("take", "take takes took taking", "nimmt nehmen nahm nahmen nehmen"),
        ("carry", "carry carries carried carrying", "trägt tragen trug trugen tragen"),
        ("stop", "stop stops stopped stopping", "hält halten hielt hielten halten"),
        ("wait", "wait waits waited waiting", "wartet warten wartete warteten warten"),
        ("lie", "lie lies lay lying", "liegt liegen lag lagen liegen"),
        (
            "glitter",
            "glitter glitters glittered glittering",
            "glitzert glitzern glitzerte glitzerten glitzern",
        ),
        ("see", "see sees saw seeing", "sieht sehen sah sahen sehen"),
        ("dry", "dry dries dried drying", "trocknet trocknen trocknete trockneten trocknen"),
        ("meet", "meet meets met meeting", "trifft treffen traf trafen treffen"),
        ("build", "build builds built building", "baut bauen baute bauten bauen"),
    ],
)
def test_forms_of_verbs(lexicon, word: str, english: str, german: str) -> None:
    found = verb(lexicon, word)
    assert list(found.english) == english.split()
    keys = [("present", 0), ("present", 1), ("past", 0), ("past", 1), ("future", 0)]
    assert [found.german[key] for key in keys] == german.split()


def test_degrees_of_adjectives(lexicon) -> None:
    found = {a.english[0]: a for z in lexicon.adjectives.values() for a in z.items}
    assert found["old"].english == ("old", "older", "oldest")
    assert found["old"].german == ("alt", "älter", "ältest")
    assert found["happy"].english == ("happy", "happier", "happiest")
    assert found["beautiful"].english[1] == "more beautiful"
    assert found["wise"].english == ("wise", "wiser", "wisest")
    assert found["wise"].german == ("weis", "weiser", "weisest")
    assert found["small"].german == ("klein", "kleiner", "kleinst")


def test_zipf_weights() -> None:
    draws = Counter()
    dice, zipf = Dice(5), Zipf(range(50), shift=3.0)
    for _ in range(40000):
        draws[zipf.draw(dice)] += 1
    total = sum(1 / (rank + 3) for rank in range(50))
    for rank in (0, 1, 9, 49):
        expected = 40000 / (rank + 3) / total
        assert abs(draws[rank] - expected) < 4 * expected**0.5


def test_sentences_by_hand(lexicon) -> None:
    """Cases, endings, word order: each German sentence was written before the grammar was."""
    adjectives = {a.english[0]: a for z in lexicon.adjectives.values() for a in z.items}
    man, dog = noun(lexicon, "man"), noun(lexicon, "dog")
    horse, house, coat = noun(lexicon, "horse"), noun(lexicon, "house"), noun(lexicon, "coat")
    old, red = adjectives["old"], adjectives["red"]
    the_man = Phrase(man, determiner="the")
    my_old_dog = Phrase(dog, determiner="my", adjective=old)
    red_coat = Phrase(coat, determiner="a", adjective=red)
    dogs = Phrase(dog, number=1, determiner="a", adjective=old)
    of_man = Phrase(horse, owner=Phrase(man, determiner="this"))
    of_anna = Phrase(horse, owner=Phrase(None, "Anna"), adjective=old, degree=1)
    oldest = Phrase(house, determiner="the", number=1, adjective=old, degree=2)
    take, follow = verb(lexicon, "take"), verb(lexicon, "follow")
    near = lexicon.prepositions[1], oldest
    today, soon = ("today", "heute"), ("soon", "bald")
    cases = [
        (Clause(take, "present", False, the_man, red_coat),
         "the man takes a red coat", "der Mann nimmt einen roten Mantel"),
        (Clause(follow, "past", True, my_old_dog, dogs),
         "my old dog did not follow old dogs", "mein alter Hund verfolgte alte Hunde nicht"),
        (Clause(follow, "progressive", False, dogs, of_man, time=today, time_first=True),
         "today old dogs are following this man's horse",
         "heute verfolgen alte Hunde gerade das Pferd dieses Mannes"),
        (Clause(follow, "future", False, of_anna, my_old_dog, time=soon, place=near),
         "Anna's older horse will follow my old dog near the oldest houses soon",
         "Annas älteres Pferd wird bald meinen alten Hund bei den ältesten Häusern verfolgen"),
        (Clause(take, "past", False, Phrase(None, "Paul"), red_coat, manner=("often", "oft")),
         "Paul took a red coat often", "Paul nahm einen roten Mantel oft"),
    ]  # fmt: skip
    for clause, english, german in cases:
        assert " ".join(_english(clause)) == english
        assert " ".join(_german(clause)) == german


def test_the_object_decides_the_translation_of_some_verbs(lexicon) -> None:
    enter = verb(lexicon, "enter")
    assert enter.forms("building")["present", 0] == "betritt"
    assert enter.forms("vehicle")["present", 0] == "besteigt"
    assert sum(v.german != v.other for v in lexicon.verbs.items) == 4


def test_a_and_an(lexicon) -> None:
    grammar, dice = Grammar(lexicon), Dice(7)
    english = [grammar.pair(dice)[0] for _ in range(2000)]
    pairs = [(a, b) for text in english for a, b in zip(text.split(), text.split()[1:])]
    following = {article: {b[0] for a, b in pairs if a == article} for article in ("a", "an")}
    assert following["an"] and following["an"] <= set("aeiou")
    assert following["a"] and not following["a"] & set("aeiou")


def test_command_line_writes_whole_files(tmp_path: Path, capsys) -> None:
    corpus.main(
        [str(tmp_path / "c"), "--seed", "4", "--train", "30", "--valid", "5", "--test", "6"]
    )
    names = {f"{split}.{side}" for split in SIZES for side in ("en", "de")}
    assert {path.name for path in (tmp_path / "c").iterdir()} == names
    for split, size in (("train", 30), ("valid", 5), ("test", 6)):
        for side, at in (("en", 0), ("de", 1)):
            lines = (tmp_path / "c" / f"{split}.{side}").read_text(encoding="utf-8").splitlines()
            expected = corpus.generate(4, {"train": 30, "valid": 5, "test": 6})[split]
            assert lines == [pair[at] for pair in expected]
            assert len(lines) == size
    assert "train: 30 sentences" in capsys.readouterr().out
