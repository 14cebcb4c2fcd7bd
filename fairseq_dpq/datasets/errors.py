"""The exception of the prepare scripts, and two kinds of it that tell what may follow.

Its text is a single line for the user; the command line prints it and exits with code 2.
"""

from __future__ import annotations


class PrepareError(Exception):
    """Something the user can put right: a missing file, a wrong checksum, a bad flag."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        # Names come from archives: a terminal must not see their control characters.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class Unfit(PrepareError):
    """Wrong bytes, or no room for them: only a file with a known checksum may stand in."""


class Rejected(PrepareError):
    """A download proved unusable; fetching again takes the next address or route."""
