"""The console commands. Help and the names of files that do not exist are answered here, before
torch is imported, which alone takes a second; all else is the command's own module.

`commands.json` has the help text of each command, and how many values each of its flags takes;
`python tests/test_start.py` writes it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Sequence

_COMMANDS = Path(__file__).with_name("commands.json")
# Which of a command's positional arguments are files that must exist
_INPUTS = {
    "compact": slice(0, -1),
    "inspect": slice(None),
    "export": slice(0, 1),
    "quantize": slice(0, 1),
    "report": slice(None),
    "classify": slice(0, 1),
    "squad": slice(0, 1),
    "path": slice(0),
    "sweep": slice(0),
}


def start(name: str, argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    own = given[: given.index("--")] if "--" in given else given
    command = json.loads(_COMMANDS.read_text(encoding="utf-8")).get(name)
    if command is not None and "--debug" not in own:
        helps = "-h" in own or "--help" in own
        if helps and not _extended():
            print(command["help"], end="")
            return 0
        for text in () if helps else positional(own, command["flags"])[_INPUTS[name]]:
            path = text if os.path.exists(text) else text.partition("=")[2] or text
            if not os.path.exists(path):
                shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path)
                said = f"cannot read {shown}: No such file or directory"
                print(f"fairseq-dpq-{name}: error: {said}", file=sys.stderr)
                return 2
    return import_module(f"fairseq_dpq.cli.{name}").main(given)


def _extended() -> bool:
    """Whether other packages add flags, which only the command's own module knows."""
    from fairseq_dpq.registry import extensions

    return bool(extensions())


def positional(words: Sequence[str], flags: dict[str, Any]) -> list[str]:
    """The words that are neither flags nor their values; none if a flag is not known, as those of
    other packages are not."""
    out: list[str] = []
    waiting = 0.0  # values that the last flag still takes
    for word in words:
        if word.startswith("-") and word != "-":
            flag, equals, _ = word.partition("=")
            if flag not in flags:
                return []
            takes = flags[flag]
            waiting = 0 if equals else float("inf") if takes in ("+", "*") else float(takes)
        elif waiting:
            waiting -= 1
        else:
            out.append(word)
    return out


def __getattr__(name: str) -> Any:
    """The functions that the console scripts call, one for each command."""
    if name not in _INPUTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(start, name)
