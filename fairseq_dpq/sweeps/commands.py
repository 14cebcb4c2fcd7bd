"""The command of each run: the user's own, or a recipe, with the flags of the point."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.config import flag, flag_fields, flag_type
from fairseq_dpq.sweeps.errors import SweepError
from fairseq_dpq.sweeps.grid import Point

_ROOT = Path(__file__).resolve().parent.parent.parent
_TRAIN = _ROOT / "scripts" / "train.sh"
# Flags that the sweep sets, and those that would keep it from reading results or going on.
_OWN = {"--save-dir": True, "--log-format": True, "--log-file": True}
_LOST = {"--no-save": False, "--no-last-checkpoints": False}
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Command:
    """One run's words and what its environment adds."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """As one could type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass(frozen=True)
class Base:
    """What all runs of a sweep have in common.

    `words` are the command, or with a `recipe` more flags of it. `launcher` comes before each.
    """

    words: tuple[str, ...]
    recipe: str | None = None
    launcher: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what cannot be trained."""
        if self.recipe is not None:
            if not _TRAIN.is_file():
                raise SweepError(
                    f"--recipe {self.recipe}: recipes are in the checkout of fairseq-dpq, not in "
                    "the installed package; give the fairseq-train command after --"
                )
            if not (_ROOT / "recipes" / f"{self.recipe}.conf").is_file():
                names = sorted(path.stem for path in (_ROOT / "recipes").glob("*.conf"))
                raise SweepError(f"--recipe {self.recipe}: choose of {', '.join(names)}")
            return
        if not self.words:
            raise SweepError("give --recipe NAME, or a command: -- fairseq-train DATA --arch ...")
        if any("hydra-train" in word for word in self.words[:4]):
            raise SweepError("fairseq-hydra-train has other flags; give a fairseq-train command")

    def command(self, point: Point, folder: Path) -> Command:
        """The command of one point, whose files go to `folder`."""
        own = ["--save-dir", str(folder / CHECKPOINTS), "--log-format", "json"]
        own = [*point.flags(), *own, "--no-epoch-checkpoints"]
        given = without(self.words, {**_OWN, **_LOST, **_dpq_flags(point)})
        if self.recipe is None:
            words = [find_program(given[0]), *given[1:], *own]
            return Command([*self.launcher, *words])
        words = ["sh", str(_TRAIN), self.recipe, point.method or "full", *given, *own]
        # The recipe's own sharing is turned off: each point has its own.
        return Command([*self.launcher, *words], {"SHARE": "0", "PYTHON": sys.executable})

    def to_dict(self) -> dict[str, Any]:
        return {
            "words": list(self.words),
            "recipe": self.recipe,
            "launcher": list(self.launcher),
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Base:
        return cls(tuple(raw["words"]), raw["recipe"], tuple(raw["launcher"]))


def _dpq_flags(point: Point) -> dict[str, bool]:
    """Flags to remove, with whether each takes a value: those of the grid; for the full table all
    of DPQ."""
    grid = ("K", "D", "method", "share_subspaces")
    return {
        flag(f.name): flag_type(f) is not bool
        for f in flag_fields()
        if point.method is None or f.name in grid
    }


def without(words: Sequence[str], flags: dict[str, bool]) -> list[str]:
    """The words without some flags and, where a flag takes one, its value."""
    out: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in flags:
            skip = flags[name] and not equals
        else:
            out.append(word)
    return out


def find_program(name: str) -> str:
    """The program beside this Python, or on the PATH, or the name itself."""
    if os.sep in name:
        return name
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name
