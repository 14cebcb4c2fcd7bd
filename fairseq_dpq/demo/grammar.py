"""Sentences of the demo's two languages: meanings are drawn from the lexicon, then expressed in the
source (free order, marked by case) and in the target (verb last, modifiers last, agreement)."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq_dpq.demo.lexicon import PLACES, TENSES, Adjective, Dice, Lexicon, Noun, Verb

# determiners: source, then the target form for each gender and number
DETERMINERS = (
    ("lo", ("va", "van", "vo", "von")),
    ("un", ("", "", "", "")),  # the target language has no indefinite article
    ("kel", ("thi", "thin", "tho", "thon")),
    ("mio", ("ja", "jan", "jo", "jon")),
)


@dataclass(frozen=True)
class Phrase:
    """A noun with its modifiers."""

    noun: Noun
    number: str
    determiner: int | None  # None for names
    numeral: tuple[str, str] | None
    adjective: Adjective | None
    degree: int
    relative: Clause | None = None  # a clause about the noun, which is its subject


@dataclass(frozen=True)
class Clause:
    """Who did what to whom, when, where and how."""

    verb: Verb
    tense: str
    negated: bool
    subject: Phrase
    object: Phrase | None
    time: tuple[str, str] | None
    manner: tuple[str, str] | None
    place: tuple[tuple[str, str], Phrase] | None
    object_first: bool


class Grammar:
    """Draws meanings and expresses them in both languages."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon

    def pair(self, dice: Dice) -> tuple[str, str]:
        """One sentence in the source and in the target language."""
        clauses = [self._clause(dice)]
        if dice.chance(0.12):
            clauses.append(self._clause(dice))
        source = " ni ".join(" ".join(self._source(clause)) for clause in clauses)
        target = " zha ".join(" ".join(self._target(clause)) for clause in clauses)
        return source + " .", target + " ."

    # -- meanings ------------------------------------------------------------------------------

    def _phrase(self, dice: Dice, kind: str, plain: bool = False) -> Phrase:
        if kind == "person" and dice.chance(0.3):
            name = self.lexicon.names.draw(dice)
            return Phrase(name, "singular", None, None, None, 0)
        noun = self.lexicon.nouns[kind].draw(dice)
        plural = dice.chance(0.35)
        adjective = self.lexicon.adjectives[kind].draw(dice) if dice.chance(0.35) else None
        return Phrase(
            noun=noun,
            number="plural" if plural else "singular",
            determiner=dice.below(len(DETERMINERS)),
            numeral=dice.pick(self.lexicon.numerals) if plural and dice.chance(0.3) else None,
            adjective=adjective,
            degree=1 if dice.chance(0.2) else 0,
            relative=None if plain or not dice.chance(0.08) else self._relative(dice, noun),
        )

    def _relative(self, dice: Dice, noun: Noun) -> Clause | None:
        verb = self.lexicon.verbs.draw(dice)
        if noun.kind not in verb.subjects:
            return None
        head = Phrase(noun, "singular", None, None, None, 0)
        tense = dice.pick(TENSES)
        return Clause(
            verb, tense, False, head, self._object(dice, verb, True), None, None, None, False
        )

    def _object(self, dice: Dice, verb: Verb, plain: bool) -> Phrase | None:
        return self._phrase(dice, dice.pick(verb.objects), plain) if verb.objects else None

    def _clause(self, dice: Dice) -> Clause:
        verb = self.lexicon.verbs.draw(dice)
        tense = dice.pick(TENSES)
        place = None
        if dice.chance(0.3):
            preposition = dice.pick(self.lexicon.prepositions)
            place = (preposition, self._phrase(dice, dice.pick(PLACES), plain=True))
        return Clause(
            verb=verb,
            tense=tense,
            negated=dice.chance(0.12),
            subject=self._phrase(dice, dice.pick(verb.subjects)),
            object=self._object(dice, verb, False),
            time=self.lexicon.times[tense].draw(dice) if dice.chance(0.3) else None,
            manner=self.lexicon.manners.draw(dice) if dice.chance(0.15) else None,
            place=place,
            object_first=dice.chance(0.25),
        )

    # -- source: [time] subject verb object, or object verb subject; modifiers before the noun ---

    def _source_phrase(self, phrase: Phrase, case: str) -> list[str]:
        words = []
        if phrase.determiner is not None:
            words.append(DETERMINERS[phrase.determiner][0])
        if phrase.numeral is not None:
            words.append(phrase.numeral[0])
        if phrase.adjective is not None:
            words.append(phrase.adjective.source[phrase.degree])
        words.append(phrase.noun.source[case, phrase.number])
        if phrase.relative is not None:
            clause = phrase.relative
            words += ["ke", clause.verb.source[clause.tense, phrase.number]]
            if clause.object is not None:
                words += self._source_phrase(clause.object, "object")
        return words

    def _source(self, clause: Clause) -> list[str]:
        verb = ["no"] if clause.negated else []
        verb.append(clause.verb.source[clause.tense, clause.subject.number])
        verb += [clause.manner[0]] if clause.manner else []
        subject = self._source_phrase(clause.subject, "subject")
        other = self._source_phrase(clause.object, "object") if clause.object else []
        words = [clause.time[0]] if clause.time else []
        first, last = (other, subject) if clause.object_first and other else (subject, other)
        words += first + verb + last
        if clause.place:
            preposition, where = clause.place
            words += [preposition[0], *self._source_phrase(where, "object")]
        return words

    # -- target: subject time place object manner verb; modifiers after the noun, in agreement ----

    def _target_phrase(self, phrase: Phrase) -> list[str]:
        noun, number = phrase.noun, phrase.number
        words = [noun.target[number]]
        if phrase.adjective is not None:
            words += ["mesh"] if phrase.degree else []
            words.append(phrase.adjective.target[noun.gender, number])
        if phrase.numeral is not None:
            words.append(phrase.numeral[1])
        if phrase.determiner is not None:
            forms = DETERMINERS[phrase.determiner][1]
            form = forms[2 * noun.gender + (number == "plural")]
            words += [form] if form else []
        if phrase.relative is not None:
            clause = phrase.relative
            words.append("wo" if noun.gender == 0 else "wu")
            words += self._target_phrase(clause.object) if clause.object else []
            words.append(self._target_verb(clause, number))
        return words

    def _target_verb(self, clause: Clause, number: str) -> str:
        kind = clause.object.noun.kind if clause.object else ""
        forms = clause.verb.target
        if kind in clause.verb.other_objects:
            forms = clause.verb.target_other
        return forms[clause.tense, number]

    def _target(self, clause: Clause) -> list[str]:
        words = self._target_phrase(clause.subject)
        words += [clause.time[1]] if clause.time else []
        if clause.place:
            preposition, where = clause.place
            words += [*self._target_phrase(where), preposition[1]]
        words += self._target_phrase(clause.object) if clause.object else []
        words += [clause.manner[1]] if clause.manner else []
        words.append(self._target_verb(clause, clause.subject.number))
        words += ["nakh"] if clause.negated else []
        return words
