"""Data sets of the paper: download, check, clean and binarise.

A module per family, each with a table SETS of its data sets; files.txt says where their files are.
"""

from __future__ import annotations


class PrepareError(Exception):
    """Bad input: a missing file, a wrong checksum, an invalid flag. Its text is one line, which the
    command line prints."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        # Names come from archives, so control characters must not reach the terminal.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class Unfit(PrepareError):
    """Wrong bytes, or a full disk: only a file with a known checksum may be used instead."""
