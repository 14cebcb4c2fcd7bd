"""The words of the demo's two invented languages: Zipf-distributed lemmas in semantic classes, with
every inflected form spelled out for the source (case, number, tense) and the target (agreement)."""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass
from typing import Generic, Sequence, TypeVar

T = TypeVar("T")

NOUN_CLASSES = (
    *("person", "animal", "food", "drink", "tool", "vehicle"),
    *("building", "plant", "cloth", "body", "book", "stone"),
)
PLACES = ("building", "vehicle", "plant")
# who does what to whom: the classes a verb takes as subject and as object ("" = no object)
VERB_FRAMES = (
    ("person", "tool book cloth stone"),
    ("person", "food drink"),
    ("animal", "food plant"),
    ("person animal", "person animal"),
    ("person", "building vehicle"),
    ("person", "plant body"),
    ("person animal vehicle", ""),
    ("plant stone building", ""),
)
TENSES = ("present", "past", "future")
NUMBERS = ("singular", "plural")
CASES = ("subject", "object")
NAME_CLASS = "person"


class Dice:
    """Random choices based on ``random.Random.random`` alone, the only method whose sequence Python
    guarantees: the corpus must be the same on every machine and version."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        return int(self._random() * n)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, with equal probability."""
        return items[self.below(len(items))]

    def unit(self) -> float:
        """A number in [0, 1)."""
        return self._random()


class Zipf(Generic[T]):
    """Items drawn with weight 1 / (rank + shift). Division rounds the same on all machines; a power
    might not."""

    def __init__(self, items: Sequence[T], shift: float = 3.0) -> None:
        self.items = tuple(items)
        self._cumulative: list[float] = []
        total = 0.0
        for rank in range(len(self.items)):
            total += 1.0 / (rank + shift)
            self._cumulative.append(total)

    def draw(self, dice: Dice) -> T:
        """One item; low ranks are frequent."""
        point = dice.unit() * self._cumulative[-1]
        at = bisect.bisect_right(self._cumulative, point)
        return self.items[min(at, len(self.items) - 1)]


@dataclass(frozen=True)
class Noun:
    """Source: case x number. Target: number; its gender rules adjectives and determiners."""

    source: dict[tuple[str, str], str]  # (case, number) -> form
    target: dict[str, str]  # number -> form
    gender: int
    kind: str


@dataclass(frozen=True)
class Verb:
    """Source and target: tense x number of the subject. Some verbs have a second target stem,
    taken with the second half of the classes they govern: the object decides the translation."""

    source: dict[tuple[str, str], str]
    target: dict[tuple[str, str], str]
    target_other: dict[tuple[str, str], str]
    subjects: tuple[str, ...]
    objects: tuple[str, ...]
    other_objects: tuple[str, ...]


@dataclass(frozen=True)
class Adjective:
    """Source: degree (0 plain, 1 comparative). Target: gender x number, degree by a particle."""

    source: tuple[str, str]
    target: dict[tuple[int, str], str]


@dataclass(frozen=True)
class Lexicon:
    """All words, grouped as the grammar draws them."""

    nouns: dict[str, Zipf[Noun]]
    names: Zipf[Noun]
    verbs: Zipf[Verb]
    adjectives: dict[str, Zipf[Adjective]]
    times: dict[str, Zipf[tuple[str, str]]]  # tense -> (source, target)
    manners: Zipf[tuple[str, str]]
    numerals: tuple[tuple[str, str], ...]
    prepositions: tuple[tuple[str, str], ...]

    def types(self) -> tuple[set[str], set[str]]:
        """Every source and every target form that the open word classes have."""
        source: set[str] = set()
        target: set[str] = set()
        for nouns in (*self.nouns.values(), self.names):
            for noun in nouns.items:
                source.update(noun.source.values())
                target.update(noun.target.values())
        for verb in self.verbs.items:
            source.update(verb.source.values())
            target.update(verb.target.values())
            target.update(verb.target_other.values())
        for adjectives in self.adjectives.values():
            for adjective in adjectives.items:
                source.update(adjective.source)
                target.update(adjective.target.values())
        return source, target


class _Speller:
    """New stems for one language; no two words get the same one."""

    def __init__(self, dice: Dice, onsets: str, vowels: str, codas: str) -> None:
        self._dice = dice
        self._used: set[str] = set()
        self._onsets, self._vowels = onsets.split(), vowels.split()
        self._codas = codas.split()

    def stem(self) -> str:
        """Two or three syllables with a closing consonant: no suffix makes two words one."""
        while True:
            count = 2 if self._dice.chance(0.8) else 3
            word = "".join(
                self._dice.pick(self._onsets) + self._dice.pick(self._vowels) for _ in range(count)
            )
            word += self._dice.pick(self._codas)
            if word not in self._used:
                self._used.add(word)
                return word


def build_lexicon(seed: int, nouns_per_class: int = 60, verbs: int = 160) -> Lexicon:
    """The lexicon of this seed: 720 nouns in 12 classes, 100 names, 160 verbs, 160 adjectives."""
    dice = Dice(seed)
    source = _Speller(dice, "p t k b d g m n s l r f", "a e i o u", "n s r l t")
    target = _Speller(dice, "v z sh ch j h w y th kr dr gl", "a e i o u", "m k v sh d")

    def noun(kind: str, gender: int) -> Noun:
        a, b = source.stem(), target.stem()
        forms = ("", "i", "am", "im")  # one suffix for each case and number
        keys = [(case, number) for case in CASES for number in NUMBERS]
        return Noun(
            source={key: a + suffix for key, suffix in zip(keys, forms)},
            target={"singular": b, "plural": b + ("en" if gender == 0 else "oy")},
            gender=gender,
            kind=kind,
        )

    def verb_forms(stem: str, suffixes: Sequence[str]) -> dict[tuple[str, str], str]:
        keys = [(tense, number) for tense in TENSES for number in NUMBERS]
        return {key: stem + suffix for key, suffix in zip(keys, suffixes)}

    def verb(rank: int) -> Verb:
        subjects, objects = (part.split() for part in VERB_FRAMES[rank % len(VERB_FRAMES)])
        a, b = source.stem(), target.stem()
        ambiguous = len(objects) > 1 and rank % 3 == 0
        endings = ("ar", "aru", "ak", "aku", "ash", "ashu")
        return Verb(
            source=verb_forms(a, ("o", "ono", "eta", "etano", "uru", "uruno")),
            target=verb_forms(b, endings),
            target_other=verb_forms(target.stem() if ambiguous else b, endings),
            subjects=tuple(subjects),
            objects=tuple(objects),
            other_objects=tuple(objects[len(objects) // 2 :]) if ambiguous else (),
        )

    def adjective() -> Adjective:
        a, b = source.stem(), target.stem()
        keys = [(gender, number) for gender in (0, 1) for number in NUMBERS]
        return Adjective(
            source=(a + "e", a + "ire"),
            target={key: b + suffix for key, suffix in zip(keys, ("a", "ane", "u", "une"))},
        )

    def pair(a: str, b: str) -> tuple[str, str]:
        return source.stem() + a, target.stem() + b

    # A class has one gender, but one noun in ten is an exception and must be learned.
    nouns = {
        kind: Zipf(
            [
                noun(kind, (at % 2) if not dice.chance(0.1) else 1 - at % 2)
                for _ in range(nouns_per_class)
            ]
        )
        for at, kind in enumerate(NOUN_CLASSES)
    }
    # Every adjective fits two neighbouring classes; a few fit all.
    common = [adjective() for _ in range(16)]
    own = [[adjective() for _ in range(12)] for _ in NOUN_CLASSES]
    adjectives = {
        kind: Zipf(common[:6] + own[at] + own[at - 1] + common[6:])
        for at, kind in enumerate(NOUN_CLASSES)
    }
    return Lexicon(
        nouns=nouns,
        names=Zipf([noun(NAME_CLASS, dice.below(2)) for _ in range(100)]),
        verbs=Zipf([verb(rank) for rank in range(verbs)]),
        adjectives=adjectives,
        times={tense: Zipf([pair("y", "ik") for _ in range(12)]) for tense in TENSES},
        manners=Zipf([pair("emente", "il") for _ in range(40)]),
        numerals=tuple(pair("", "") for _ in range(8)),
        prepositions=tuple(pair("", "") for _ in range(6)),
    )
