"""The error that the tools show in one line."""

from __future__ import annotations


class CheckpointError(Exception):
    """A file or a request that a tool cannot work with; the text is for the user."""
