"""The errors that the tools show in one line, and text that is fit for such a line."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A file or a request that a tool cannot work with; the text is for the user."""


class DPQConfigError(ValueError):
    """An option, or a combination of options, that cannot work."""


def printable(text: object) -> str:
    """The text with control characters, newlines among them, as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
