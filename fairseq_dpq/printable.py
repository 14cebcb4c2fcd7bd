"""Names out of strangers' files, made fit for a terminal."""

from __future__ import annotations


def printable(text: object) -> str:
    """The text with control characters, newlines among them, as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
