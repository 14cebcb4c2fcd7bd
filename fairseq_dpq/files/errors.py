"""The errors that the tools show in one line, and text that is fit for such a line."""

from __future__ import annotations

import contextlib
from typing import Iterator


class CheckpointError(ValueError):
    """A file or a request that a tool cannot work with; the text is for the user."""


class DPQConfigError(ValueError):
    """An option, or a combination of options, that cannot work."""


def printable(text: object) -> str:
    """The text with control characters, newlines among them, as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


@contextlib.contextmanager
def naming(what: object, kind: type[ValueError] = CheckpointError) -> Iterator[None]:
    """Errors of what a file says, as one line of this kind that names the file or its part."""
    try:
        yield
    except kind:
        raise
    except CheckpointError as error:  # it names the file
        raise kind(str(error)) from error
    except RecursionError as error:
        raise kind(printable(f"{what}: it is nested too deeply")) from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        last = (str(e).splitlines() or ["it is damaged"])[-1].strip()
        text = f"{e} is missing" if isinstance(e, KeyError) else last
        raise kind(printable(f"{what}: {text}")) from e
