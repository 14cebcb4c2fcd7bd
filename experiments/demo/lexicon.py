"""The words of the demo, English and German, from words.txt: Zipf-distributed in each class, with
every inflected form spelled out."""

from __future__ import annotations

import bisect
import random
import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Generic, Sequence, TypeVar

T = TypeVar("T")
PLACES = ("building", "vehicle", "plant", "stone")
CASES = ("nominative", "accusative", "dative", "genitive")
TENSES = ("present", "past", "future", "progressive")
GENDERS = "res"  # der, die, das


class Dice:
    """Random choices based on ``random.Random.random`` alone, the only method whose sequence Python
    guarantees: the corpus must be the same on every machine and version."""

    def __init__(self, seed: int) -> None:
        self.unit = random.Random(seed).random

    def below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        return int(self.unit() * n)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.unit() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, with equal probability."""
        return items[self.below(len(items))]


class Zipf(Generic[T]):
    """Items drawn with weight 1 / (rank + shift). Division rounds the same on all machines; a power
    might not."""

    def __init__(self, items: Sequence[T], shift: float = 3.0) -> None:
        self.items = tuple(items)
        weights = (1.0 / (rank + shift) for rank in range(len(self.items)))
        self._cumulative = list(accumulate(weights))

    def draw(self, dice: Dice) -> T:
        """One item; low ranks are frequent."""
        at = bisect.bisect_right(self._cumulative, dice.unit() * self._cumulative[-1])
        return self.items[min(at, len(self.items) - 1)]


@dataclass(frozen=True)
class Noun:
    """Forms by number (0, 1): English plain and possessive, German by case."""

    kind: str
    gender: int  # of GENDERS
    english: tuple[str, str]
    possessive: tuple[str, str]
    german: dict[tuple[str, int], str]  # (case, number) -> form


@dataclass(frozen=True)
class Verb:
    """English: base, third person, past, -ing. German: by (tense, number), the infinitive for the
    future; `other` goes with the second half of the objects: the object decides the translation."""

    english: tuple[str, str, str, str]
    german: dict[tuple[str, int], str]
    other: dict[tuple[str, int], str]
    subjects: tuple[str, ...]
    objects: tuple[str, ...]

    def forms(self, kind: str) -> dict[tuple[str, int], str]:
        """The German verb that goes with an object of this kind."""
        second = self.objects[(len(self.objects) + 1) // 2 :]
        return self.other if kind in second else self.german


@dataclass(frozen=True)
class Adjective:
    """English and German (without ending) by degree: plain, comparative, superlative."""

    english: tuple[str, str, str]
    german: tuple[str, str, str]


@dataclass(frozen=True)
class Lexicon:
    """All words, grouped as the grammar draws them."""

    nouns: dict[str, Zipf[Noun]]
    names: Zipf[str]
    verbs: Zipf[Verb]
    adjectives: dict[str, Zipf[Adjective]]
    times: dict[str, Zipf[tuple[str, str]]]  # by tense
    manners: Zipf[tuple[str, str]]
    numbers: tuple[tuple[str, str], ...]
    prepositions: tuple[tuple[str, str], ...]


def plural(word: str) -> str:
    """A regular English plural, or third person: -s, -es, -ies."""
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search(r"(s|x|z|ch|sh|[^aeiou]o)$", word) else "s")


def participle(word: str) -> str:
    """The English form in -ing."""
    if word.endswith("ie"):
        return word[:-2] + "ying"
    if re.search(r"[^e]e$", word):
        return word[:-1] + "ing"
    short = re.search(r"^[^aeiou]*[aeiou][^aeiouwxy]$", word)
    return word + (word[-1] if short else "") + "ing"


def _noun(kind: str, text: str) -> Noun:
    english, article, one, many = text.split()
    english, _, irregular = english.partition("/")
    pair = english, irregular or plural(english)
    end = "'" if pair[1].endswith("s") else "'s"
    weak = article == "r" and kind in ("person", "animal") and many in (one + "n", one + "en")
    forms = {(case, 0): many if weak and case != "nominative" else one for case in CASES}
    forms.update({(case, 1): many for case in CASES})
    if many[-1] not in "ns":
        forms["dative", 1] = many + "n"
    if article != "e" and not weak:
        hissing = re.search(r"(s|ß|x|z|sch)$", one)
        syllables = len(re.findall(r"[aeiouyäöü]+", one.lower()))
        vowel = one[-1] in "aeiou"
        forms["genitive", 0] = one + ("es" if hissing or (syllables == 1 and not vowel) else "s")
    return Noun(kind, GENDERS.index(article), pair, (pair[0] + "'s", pair[1] + end), forms)


def _conjugate(text: str) -> dict[tuple[str, int], str]:
    """Present and past of a German verb in the third person, and its infinitive."""
    infinitive, *strong = text.strip().split("/")
    stem = infinitive[:-2] if infinitive.endswith("en") else infinitive[:-1]
    soft = "e" if re.search(r"([dt]|[^lrh][nm])$", stem) and not stem.endswith("nn") else ""
    present, past = strong or (f"{stem}{soft}t", f"{stem}{soft}te")
    many = past + ("n" if past.endswith("e") else "en")
    forms = {("present", 0): present, ("present", 1): infinitive, ("past", 0): past}
    return {**forms, ("past", 1): many, ("future", 0): infinitive, ("future", 1): infinitive}


def _verb(frame: str, text: str) -> Verb:
    subjects, objects = frame.split(":")
    first, _, second = text.partition("=")
    english, german = first.split()
    base, _, past = english.partition("/")
    return Verb(
        (base, plural(base), past, participle(base)),
        _conjugate(german),
        _conjugate(second or german),
        tuple(subjects.split()),
        tuple(objects.split()),
    )


def _adjective(text: str) -> Adjective:
    english, german = text.split()
    word, _, more = english.partition("/")
    if more == "-":
        degrees = (word, f"more {word}", f"most {word}")
    else:
        more = more or word + ("r" if word.endswith("e") else "er")
        degrees = (word, more, more[:-2] + "est")
    german, _, other = german.partition("/")
    stem = german[:-1] if german.endswith("e") else german
    other = other or stem + "er"
    hard = re.search(r"(d|t|s|ß|z|sch)er$", other)
    return Adjective(degrees, (stem, other, other[:-2] + ("est" if hard else "st")))


def read_words(path: Path) -> list[tuple[str, list[str]]]:
    """The sections of words.txt with their entries, in order."""
    sections: list[tuple[str, list[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            sections.append((line[1:-1], []))
        elif line and not line.startswith("#"):
            sections[-1][1].extend(entry.strip() for entry in line.split("|"))
    return sections


def build_lexicon(seed: int) -> Lexicon:
    """The words of words.txt. The seed decides which verbs and adjectives are frequent."""
    dice = Dice(seed)
    words = read_words(Path(__file__).with_name("words.txt"))
    lists = {name: entries for name, entries in words if ":" not in name}
    kinds = [name for name, entries in words if len(entries[0].split()) == 4 and ":" not in name]
    frames = [(frame, entries) for frame, entries in words if ":" in frame]
    # Verbs of all frames in turn, so that each frame has frequent ones.
    longest = max(len(entries) for _, entries in frames)
    turns = [(f, es[at]) for at in range(longest) for f, es in frames if at < len(es)]
    adjectives = {
        name: [_adjective(entry) for entry in lists[f"adjective {name}"]]
        for name in ["all", *kinds]
    }
    common = _shuffled(dice, adjectives["all"])

    def pairs(name: str) -> list[tuple[str, str]]:
        found = (entry.split() for entry in lists[name])
        return [(english, german) for english, german in found]

    return Lexicon(
        nouns={kind: Zipf([_noun(kind, entry) for entry in lists[kind]]) for kind in kinds},
        names=Zipf(lists["name"]),
        verbs=Zipf([_verb(*turn) for turn in turns]),
        adjectives={
            kind: Zipf(common[:6] + _shuffled(dice, adjectives[kind]) + common[6:])
            for kind in kinds
        },
        times={tense: Zipf(pairs(tense)) for tense in ("present", "past", "future")},
        manners=Zipf(pairs("manner")),
        numbers=tuple(pairs("number")),
        prepositions=tuple(pairs("preposition")),
    )


def _shuffled(dice: Dice, items: Sequence[T]) -> list[T]:
    left = list(items)
    return [left.pop(dice.below(len(left))) for _ in range(len(left))]
