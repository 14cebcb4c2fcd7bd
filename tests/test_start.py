"""The console commands answer what needs no torch before torch is imported.

`python tests/test_start.py` writes the help texts and flags into fairseq_dpq/cli/commands.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from fairseq_dpq.cli import start  # noqa: E402

WIDTH = "100"
MISSING = {
    "compact": ["no.pt", "out.pt"],
    "inspect": ["no.pt", "--dpq-K", "32"],
    "export": ["--no-symbols", "no.pt", "out.safetensors"],
    "quantize": ["--dpq-K", "32", "no.pt", "out.pt", "--dpq-D=4"],
    "report": ["A=no.pt", "--out", "report", "--words", "a", "b"],
    "classify": ["no.pt", "-"],
    "squad": ["no.pt", "--data", "x"],
}


def described() -> dict[str, Any]:
    """What commands.json has to say."""
    os.environ["COLUMNS"] = WIDTH
    out = {}
    for name in start._INPUTS:
        parser = import_module(f"fairseq_dpq.cli.{name}").get_parser()
        flags = {}
        for action in parser._actions:
            takes = 1 if action.nargs is None else action.nargs
            takes = 0 if isinstance(action, argparse._HelpAction) else takes
            flags.update(dict.fromkeys(action.option_strings, 1 if takes == "?" else takes))
        # Python 3.13 names the value of a flag with two names once.
        text = re.sub(r"(--[\w-]+) ([A-Z]+), (--[\w-]+ \2)", r"\1, \3", parser.format_help())
        out[name] = {"help": text, "flags": flags}
    return out


def test_the_texts_are_those_of_the_parsers(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", WIDTH)
    known = json.loads(start._COMMANDS.read_text(encoding="utf-8"))
    assert known == described(), "run: python tests/test_start.py"


def measured(*words: str) -> tuple[subprocess.CompletedProcess, float]:
    """A command in a process of its own, and the seconds of processor time that it took."""
    code = f"import sys; from fairseq_dpq.cli import start; sys.exit(start.{words[0]}())"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *words[1:]], capture_output=True, text=True, cwd=ROOT
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_file_takes_half_a_second(name: str) -> None:
    done, seconds = measured(name, *MISSING[name])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"fairseq-dpq-{name}: error: cannot read no.pt: No such file or directory\n"
    )
    assert seconds < 0.5


@pytest.mark.parametrize("name", start._INPUTS)
def test_help_takes_a_second(name: str) -> None:
    done, seconds = measured(name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: fairseq-dpq-{name} ")
    assert seconds < 1.0


def test_import_takes_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import fairseq_dpq"], check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.1


def test_positional_words() -> None:
    flags = {"-o": 1, "--out": 1, "--force": 0, "--words": "+"}
    for words, want in (
        ("a --out b c", ["a", "c"]),
        ("--out=b c --force d", ["c", "d"]),
        ("a --words b c --force d", ["a", "d"]),
        ("a --unknown b", []),
        ("- -o x", ["-"]),
    ):
        assert start.positional(words.split(), flags) == want


if __name__ == "__main__":
    start._COMMANDS.write_text(json.dumps(described(), indent=1) + "\n", encoding="utf-8")
