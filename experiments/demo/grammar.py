"""Sentences of the demo: meanings are drawn from the lexicon, then said in English and in German,
with German's cases, genders, agreement and word order."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.demo.lexicon import PLACES, TENSES, Adjective, Dice, Lexicon, Noun, Verb

# Endings by case, for der, die, das and the plural: of `dieser`, and of adjectives without article,
# after `der` and `dieser`, and after `ein` and `mein`.
_ARTICLE = {
    "nominative": ("er", "e", "es", "e"),
    "accusative": ("en", "e", "es", "e"),
    "dative": ("em", "er", "em", "en"),
    "genitive": ("es", "er", "es", "er"),
}
_STRONG = {**_ARTICLE, "genitive": ("en", "er", "en", "er")}
_WEAK = {
    "nominative": ("e", "e", "e", "en"),
    "accusative": ("en", "e", "e", "en"),
    "dative": ("en",) * 4,
    "genitive": ("en",) * 4,
}
_MIXED = {
    **_WEAK,
    "nominative": ("er", "e", "es", "en"),
    "accusative": ("en", "e", "es", "en"),
}
_DEFINITE = {
    "nominative": ("der", "die", "das", "die"),
    "accusative": ("den", "die", "das", "die"),
    "dative": ("dem", "der", "dem", "den"),
    "genitive": ("des", "der", "des", "der"),
}
DETERMINERS = ("the", "a", "this", "my")


@dataclass(frozen=True)
class Phrase:
    """A noun with its modifiers, or a name."""

    noun: Noun | None
    name: str = ""
    number: int = 0
    determiner: str = ""
    owner: Phrase | None = None  # instead of a determiner
    count: tuple[str, str] | None = None
    adjective: Adjective | None = None
    degree: int = 0

    @property
    def kind(self) -> str:
        return "person" if self.noun is None else self.noun.kind


@dataclass(frozen=True)
class Clause:
    """Who did what to whom, when, where and how."""

    verb: Verb
    tense: str
    negated: bool
    subject: Phrase
    object: Phrase | None = None
    time: tuple[str, str] | None = None
    time_first: bool = False
    manner: tuple[str, str] | None = None
    place: tuple[tuple[str, str], Phrase] | None = None


class Grammar:
    """Draws meanings and says them in both languages."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon

    def pair(self, dice: Dice) -> tuple[str, str]:
        """One sentence in English and in German."""
        clause = self._clause(dice)
        return " ".join([*_english(clause), "."]), " ".join([*_german(clause), "."])

    def _phrase(self, dice: Dice, kind: str, plain: bool = False) -> Phrase:
        words = self.lexicon
        if kind == "person" and dice.chance(0.25):
            return Phrase(None, words.names.draw(dice))
        noun, number = words.nouns[kind].draw(dice), int(dice.chance(0.35))
        determiner = dice.pick(DETERMINERS)
        owner = None
        if not plain and dice.chance(0.12):
            owner = self._phrase(dice, dice.pick(["person", *words.nouns]), plain=True)
        adjective = words.adjectives[kind].draw(dice) if dice.chance(0.35) else None
        degree = (1 if dice.chance(0.5) else 2) if dice.chance(0.25) else 0
        if degree == 2 and determiner != "the":
            degree = 1
        count = dice.pick(words.numbers) if number and not owner and dice.chance(0.25) else None
        return Phrase(noun, "", number, determiner, owner, count, adjective, degree)

    def _clause(self, dice: Dice) -> Clause:
        verb, tense = self.lexicon.verbs.draw(dice), dice.pick(TENSES)
        place = None
        if dice.chance(0.3):
            where = self._phrase(dice, dice.pick(PLACES), plain=True)
            place = (dice.pick(self.lexicon.prepositions), where)
        times = self.lexicon.times["present" if tense == "progressive" else tense]
        return Clause(
            verb,
            tense,
            negated=dice.chance(0.12),
            subject=self._phrase(dice, dice.pick(verb.subjects)),
            object=self._phrase(dice, dice.pick(verb.objects)) if verb.objects else None,
            time=times.draw(dice) if dice.chance(0.3) else None,
            time_first=dice.chance(0.5),
            manner=self.lexicon.manners.draw(dice) if dice.chance(0.15) else None,
            place=place,
        )


# -- English: [time] subject verb object [manner] [place] [time] ----------------------------------


def _english_phrase(phrase: Phrase, possessive: bool = False) -> list[str]:
    if phrase.noun is None:
        return [phrase.name + ("'s" if possessive else "")]
    words = []
    if phrase.owner is not None:
        words += _english_phrase(phrase.owner, possessive=True)
    elif not (phrase.determiner == "a" and phrase.number):
        plural = phrase.determiner == "this" and phrase.number
        words.append("these" if plural else phrase.determiner)
    words += [phrase.count[0]] if phrase.count else []
    words += phrase.adjective.english[phrase.degree].split() if phrase.adjective else []
    forms = phrase.noun.possessive if possessive else phrase.noun.english
    words.append(forms[phrase.number])
    if words[0] == "a" and words[1][0] in "aeiou":
        words[0] = "an"
    return words


def _english_verb(clause: Clause) -> list[str]:
    base, third, past, participle = clause.verb.english
    many, no = clause.subject.number, ["not"] if clause.negated else []
    if clause.tense == "future":
        return ["will", *no, base]
    if clause.tense == "progressive":
        return ["are" if many else "is", *no, participle]
    if no:
        return ["did" if clause.tense == "past" else "do" if many else "does", *no, base]
    return [past if clause.tense == "past" else base if many else third]


def _english(clause: Clause) -> list[str]:
    time = [clause.time[0]] if clause.time else []
    words = [*time] if clause.time_first else []
    words += [*_english_phrase(clause.subject), *_english_verb(clause)]
    words += _english_phrase(clause.object) if clause.object else []
    words += [clause.manner[0]] if clause.manner else []
    if clause.place:
        words += [clause.place[0][0], *_english_phrase(clause.place[1])]
    return words + ([] if clause.time_first else time)


# -- German: the finite verb second, infinitives last ----------------------------------------------


def _german_phrase(phrase: Phrase, case: str) -> list[str]:
    if phrase.noun is None:
        return [phrase.name + ("s" if case == "genitive" else "")]
    noun, many = phrase.noun, phrase.number
    column = 3 if many else noun.gender
    owned_by_name = phrase.owner is not None and phrase.owner.noun is None
    determiner = "the" if phrase.owner is not None else phrase.determiner
    endings, article = _MIXED, ""
    if owned_by_name or not determiner or (determiner == "a" and many):
        endings = _STRONG
        article = _german_phrase(phrase.owner, "genitive")[0] if owned_by_name else ""  # type: ignore
    elif determiner == "the":
        endings, article = _WEAK, _DEFINITE[case][column]
    elif determiner == "this":
        endings, article = _WEAK, "dies" + _ARTICLE[case][column]
    else:
        bare = (case, column) in (("nominative", 0), ("nominative", 2), ("accusative", 2))
        article = "ein" if determiner == "a" else "mein"
        article += "" if bare else _ARTICLE[case][column]
    words = [article] if article else []
    words += [phrase.count[1]] if phrase.count else []
    if phrase.adjective is not None:
        words.append(phrase.adjective.german[phrase.degree] + endings[case][column])
    words.append(noun.german[case, many])
    if phrase.owner is not None and not owned_by_name:
        words += _german_phrase(phrase.owner, "genitive")
    return words


def _german_verb(clause: Clause) -> str:
    forms = clause.verb.forms(clause.object.kind if clause.object else "")
    tense = "present" if clause.tense == "progressive" else clause.tense
    return forms[tense, clause.subject.number]


def _german(clause: Clause) -> list[str]:
    subject, verb, last = _german_phrase(clause.subject, "nominative"), _german_verb(clause), []
    if clause.tense == "future":
        verb, last = "werden" if clause.subject.number else "wird", [verb]
    time = [clause.time[1]] if clause.time else []
    words = [*time, verb, *subject] if time and clause.time_first else [*subject, verb, *time]
    words += ["gerade"] if clause.tense == "progressive" else []
    words += _german_phrase(clause.object, "accusative") if clause.object else []
    words += ["nicht"] if clause.negated else []
    words += [clause.manner[1]] if clause.manner else []
    if clause.place:
        words += [clause.place[0][1], *_german_phrase(clause.place[1], "dative")]
    return words + last
