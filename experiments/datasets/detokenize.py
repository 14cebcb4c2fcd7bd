"""Detokenise text with Moses-style escapes, so that sacreBLEU can score it.

``python -m experiments.datasets.detokenize < tokenised > running`` does it line by line.
"""

from __future__ import annotations

import re
import sys

_ESCAPES = {
    "&apos;": "'", "&quot;": '"', "&#91;": "[", "&#93;": "]", "&#124;": "|",
    "&lt;": "<", "&gt;": ">",
}  # fmt: skip
_CLOSING = re.compile(r"^[,.?!:;%)\]}\u2026\u201d\u2019]+$")
_OPENING = re.compile(r"^[(\[{\u00bf\u00a1\u201c\u2018]+$")
_CONTRACTION = re.compile(r"^'(?:s|S|m|M|d|D|re|RE|ve|VE|ll|LL|t|T)$")


def unescape(text: str) -> str:
    """Undo the tokeniser's escapes; &amp; last, so that no new escape appears."""
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character)
    return text.replace("&amp;", "&")


def detokenize(line: str) -> str:
    """Join punctuation to its word, and split-off contractions such as `don 't`."""
    words = unescape(line).split()
    out: list[str] = []
    glue = True  # the next word is joined to the previous one
    open_quotes = {'"': False, "'": False}
    for word in words:
        if word in open_quotes:
            # Quotes alternate: the first opens, the next closes.
            closing = open_quotes[word]
            open_quotes[word] = not closing
            out.append(word if closing or glue else " " + word)
            glue = not closing
        elif _CLOSING.match(word) or _CONTRACTION.match(word) or word == "n't":
            out.append(word)
            glue = False
        elif word == "@-@":
            out.append("-")
            glue = True
        else:
            out.append(word if glue else " " + word)
            glue = bool(_OPENING.match(word))
    return "".join(out)


def main() -> int:
    """Filter standard input to standard output."""
    for line in sys.stdin:
        sys.stdout.write(detokenize(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
