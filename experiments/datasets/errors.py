"""The exceptions of the prepare scripts.

Their text is a single line. The command line prints it and exits with code 2: bad input.
"""

from __future__ import annotations


class PrepareError(Exception):
    """Bad input: a missing file, a wrong checksum, an invalid flag."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        # Names come from archives, so control characters must not reach the terminal.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class Unfit(PrepareError):
    """Wrong bytes, or a full disk: only a file with a known checksum may be used instead."""


class Rejected(PrepareError):
    """A download cannot be used; fetching again uses the next address or route."""
