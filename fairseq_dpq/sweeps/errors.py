"""The error of a sweep that cannot start."""

from __future__ import annotations


class SweepError(Exception):
    """Bad input; the text says what would be right."""
