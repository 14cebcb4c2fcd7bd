"""WordPiece: worked examples, places in the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.datasets import PrepareError
from experiments.datasets.pieces import SPECIALS, WordPiece, read_vocabulary

WORDS = [
    *["un", "want", "able", "run", "##want", "##able", "##ed", "##ing", "##a", "##un", "##runn"],
    *["aff", "##aff", "the", "cafe", "istanbul", "a", "b", "!", "?", ",", ".", "$", "'", "#", "-"],
    *["i", "o", "##o", "\u03c2", "##\u03c2", "\u03bf\u03b4\u03bf", "\u4e2d", "\u6587"],
    *["\u1112", "##\u1161", "##\u11ab"],
]
VOCABULARY = [*SPECIALS, *WORDS]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unwanted running", "un ##want ##ed <unk>"),  # no piece `running`, `##n`
        ("UNaffable!", "un ##aff ##able !"),
        ("unaffableX", "<unk>"),  # one unknown character: the whole token is unknown
        ("  the\tCaf\u00e9\u00a0a\u3000b \n", "the cafe a b"),
        ("cafe\u0301", "cafe"),  # the accent as a character of its own
        ("\u0130stanbul", "istanbul"),  # lower case is two characters
        ("a$b'b", "a $ b ' b"),
        ("a\u2014b", "a <unk> b"),  # punctuation that is not ASCII
        ("a\u4e2d\u6587b", "a \u4e2d \u6587 b"),
        ("\ud55c", "\u1112 ##\u1161 ##\u11ab"),  # Hangul is no ideograph
        ("t\u200bh\x00e\ufffd \x07a", "the a"),  # format and control characters vanish
        ("[MASK] [a]", "<unk> <unk> <unk> <unk> a <unk>"),  # specials in a text are text
        ("a" * 201, "<unk>"),
        ("a" * 200, "a" + " ##a" * 199),
        ("", ""),
        ("\u0301", ""),
    ],
)
def test_worked_examples(text: str, expected: str) -> None:
    assert " ".join(WordPiece(VOCABULARY).encode(text)) == expected


def test_cased_keeps_capitals_and_accents() -> None:
    vocabulary = [*SPECIALS, "Caf\u00e9", "cafe", "A"]
    assert WordPiece(vocabulary, lower=False).encode("Caf\u00e9 cafe A a") == [
        *("Caf\u00e9", "cafe", "A", "<unk>")
    ]
    assert WordPiece(vocabulary).encode("Caf\u00e9 A") == ["cafe", "<unk>"]


def test_places_are_those_of_the_text() -> None:
    text = " Unwanted\u200b\u0301, CAFE\u0301s  \u4e2da"
    found = WordPiece(VOCABULARY).locate(text)
    assert [(p.piece, text[p.start : p.end]) for p in found] == [
        ("un", "Un"),
        ("##want", "want"),
        ("##ed", "ed"),
        (",", ","),
        ("<unk>", "CAFE\u0301s"),
        ("\u4e2d", "\u4e2d"),
        ("a", "a"),
    ]


def test_dictionary_keeps_the_order_without_specials(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[unused0]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nb\na\n")
    assert WordPiece(read_vocabulary(tmp_path / "vocab.txt")).words == ["[unused0]", "b", "a"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("the\n[UNK]\n")
    with pytest.raises(PrepareError, match=r"no \[PAD\] \[CLS\] \[SEP\] \[MASK\] in it"):
        read_vocabulary(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PrepareError, match="not UTF-8"):
        read_vocabulary(path)
