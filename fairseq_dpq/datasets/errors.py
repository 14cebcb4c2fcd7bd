"""The one exception of the prepare scripts.

Its text is a single line for the user; the command line prints it and exits with code 2.
"""

from __future__ import annotations


class PrepareError(Exception):
    """Something the user can put right: a missing file, a wrong checksum, a bad flag."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
