"""WordPiece as in BERT (Devlin et al., 2019): basic tokens, then the longest pieces from the left.

Every piece knows where it begins and ends in the original text.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

from fairseq_dpq.datasets.errors import PrepareError

# BERT's specials. fairseq has its own: <pad>, <unk>, <s>, </s> and <mask>.
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNKNOWN_PIECE = "<unk>"
_LONGEST = 200  # characters; a longer token is unknown, as in BERT
_CACHE = 1 << 18  # words; text repeats itself
_WORD = re.compile("[^ \t\n\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
_IDEOGRAPHS = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


class Piece(NamedTuple):
    """A piece of a text, text[start:end]."""

    piece: str
    start: int
    end: int


def is_ideograph(char: str) -> bool:
    """Chinese characters are tokens of their own; Hangul, Hiragana and Katakana are not."""
    return any(low <= ord(char) <= high for low, high in _IDEOGRAPHS)


def is_punctuation(char: str) -> bool:
    """Unicode's punctuation, and all ASCII symbols such as $ and ^."""
    code = ord(char)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(char).startswith("P")


def _is_dropped(char: str) -> bool:
    return char in "\x00\ufffd" or unicodedata.category(char) in ("Cc", "Cf")


def read_vocabulary(path: Path) -> list[str]:
    """The lines of a vocab.txt, which must have BERT's five specials."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path}: not UTF-8 text ({error})") from error
    pieces = [line.rstrip("\r") for line in text.split("\n")]
    while pieces and not pieces[-1]:
        pieces.pop()
    missing = [name for name in SPECIALS if name not in pieces]
    if missing:
        raise PrepareError(f"{path}: no {' '.join(missing)} in it, so not a vocab.txt of BERT")
    return pieces


class WordPiece:
    """Splits text into the pieces of a vocabulary; `lower` is right for BERT's uncased models."""

    def __init__(self, vocabulary: list[str], lower: bool = True) -> None:
        self.lower = lower
        # The order of the file, which fairseq's dictionary keeps after its own specials.
        self.words = [piece for piece in vocabulary if piece not in SPECIALS]
        self._starts = {piece for piece in self.words if not piece.startswith("##")}
        self._inside = {piece[2:] for piece in self.words if piece.startswith("##")}
        self._longest = max(map(len, self.words), default=0)
        self._cache: dict[str, tuple[Piece, ...]] = {}

    def encode(self, text: str) -> list[str]:
        """The pieces of a text; a token outside the vocabulary is one `<unk>`."""
        out: list[str] = []
        for match in _WORD.finditer(text):
            out += [piece.piece for piece in self._word(match.group())]
        return out

    def locate(self, text: str) -> list[Piece]:
        """The pieces of a text with their places in it."""
        out: list[Piece] = []
        for match in _WORD.finditer(text):
            first = match.start()
            out += [Piece(p.piece, first + p.start, first + p.end) for p in self._word(match[0])]
        return out

    def _word(self, word: str) -> tuple[Piece, ...]:
        """Pieces of a run of characters without white space, placed relative to its start."""
        known = self._cache.get(word)
        if known is None:
            known = tuple(p for token in self._tokens(word) for p in self._pieces(token))
            if len(self._cache) >= _CACHE:
                self._cache.clear()
            self._cache[word] = known
        return known

    def _tokens(self, word: str) -> list[list[tuple[str, int]]]:
        """Basic tokens: normalised characters, each with the place of its original."""
        tokens: list[list[tuple[str, int]]] = [[]]
        # Lower case as a whole where that keeps the places: a final sigma depends on its word.
        whole = word.lower() if self.lower else word
        for place, char in enumerate(word):
            if _is_dropped(char):
                continue
            chars = char
            if self.lower:
                small = whole[place] if len(whole) == len(word) else char.lower()
                chars = "".join(
                    c
                    for c in unicodedata.normalize("NFD", small)
                    if unicodedata.category(c) != "Mn"
                )
            if is_ideograph(char):
                tokens += [[(c, place) for c in chars], []]
                continue
            for c in chars:
                if is_punctuation(c):
                    tokens += [[(c, place)], []]
                else:
                    tokens[-1].append((c, place))
        return [token for token in tokens if token]

    def _pieces(self, token: list[tuple[str, int]]) -> list[Piece]:
        text = "".join(char for char, _ in token)
        unknown = Piece(UNKNOWN_PIECE, token[0][1], token[-1][1] + 1)
        if len(text) > _LONGEST:
            return [unknown]
        pieces: list[Piece] = []
        start = 0
        while start < len(text):
            known = self._inside if start else self._starts
            end = min(len(text), start + self._longest)
            while end > start and text[start:end] not in known:
                end -= 1
            if end == start:
                return [unknown]
            name = ("##" if start else "") + text[start:end]
            pieces.append(Piece(name, token[start][1], token[end - 1][1] + 1))
            start = end
        return pieces
