"""The points of a sweep, one training run each, and their commands: the user's own, or a recipe,
with the flags of the point."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import fairseq_dpq
from fairseq_dpq.config import flag, option_type
from fairseq_dpq.fairseq_plugin.options import flag_fields
from fairseq_dpq.methods import METHODS
from fairseq_dpq.methods.keyed import KeyedMethod
from fairseq_dpq.runs.folder import RunsError
from fairseq_dpq.runs.runner import Step
from fairseq_dpq.sizes import MAX_K

METHODS_WITH_CODES = [name for name, method in METHODS.items() if method.has_codes]
# The default; the others are baselines, some of which need files.
DPQ_METHODS = [name for name, method in METHODS.items() if isinstance(method, KeyedMethod)]
CHECKPOINTS = "checkpoints"
_PACKAGE = Path(fairseq_dpq.__file__).resolve().parent
_RECIPES = _PACKAGE.parent / "recipes"
_TRAIN = _PACKAGE.parent / "scripts" / "train.sh"
# Flags that the sweep sets, or that keep it from going on; whether each takes a value.
_DROPPED = {"--save-dir": True, "--log-format": True, "--log-file": True}
_DROPPED.update({"--no-save": False, "--no-last-checkpoints": False})


@dataclass(frozen=True)
class Point:
    """One run. Without a method it is the full table."""

    method: str | None = None
    K: int = 0
    D: int = 0
    shared: bool = False

    @property
    def name(self) -> str:
        """The run's folder and its name in tables."""
        if self.method is None:
            return "full"
        return f"{self.method}-K{self.K}-D{self.D}" + ("-shared" if self.shared else "")

    def flags(self) -> list[str]:
        """Its flags of fairseq-train."""
        if self.method is None:
            return []
        words = [flag("K"), str(self.K), flag("D"), str(self.D), flag("method"), self.method]
        return [*words, flag("share_subspaces")] if self.shared else words


@dataclass(frozen=True)
class Grid:
    """The values of each axis; every combination is a point."""

    K: Sequence[int]
    D: Sequence[int]
    methods: Sequence[str]
    shared: Sequence[bool] = (False,)
    full: bool = True

    def points(self) -> list[Point]:
        """The full table first, then the cheapest points: an early stop leaves a whole picture of
        small sizes."""
        for K in self.K:
            if not 2 <= K <= MAX_K:
                raise RunsError(f"{flag('K')} {K}: must be from 2 to {MAX_K}; try 32")
        for D in self.D:
            if D < 1:
                raise RunsError(f"{flag('D')} {D}: must be 1 or more; try 16")
        out = [
            Point(method, K, D, shared)
            for K in sorted(set(self.K))
            for D in sorted(set(self.D))
            for shared in sorted(set(self.shared))
            for method in dict.fromkeys(self.methods)
        ]
        out.sort(key=lambda p: p.K * p.D)
        return [Point(), *out] if self.full else out


@dataclass(frozen=True)
class Base:
    """What all runs of a sweep have in common.

    `words` are the command, or with a `recipe` more flags of it. `launcher` comes before each.
    """

    words: tuple[str, ...]
    recipe: str | None = None
    launcher: tuple[str, ...] = ()

    def check(self, point: Point, folder: Path) -> None:
        """Refuse what cannot be trained: parse the command of a point as fairseq-train would."""
        if self.recipe is not None:
            # An installed package has none.
            names = sorted(path.stem for path in _RECIPES.glob("*.conf"))
            if self.recipe not in names:
                known = ", ".join(names) or "those of a checkout, or give the command after --"
                raise RunsError(f"--recipe {self.recipe}: choose one of {known}")
        elif not self.words:
            raise RunsError("give --recipe NAME, or a command: -- fairseq-train DATA --arch ...")
        elif any("hydra-train" in word for word in self.words[:4]):
            raise RunsError("fairseq-hydra-train has other flags; give a fairseq-train command")
        step = self.step(point, folder)
        words = step.words[len(self.launcher) :]
        if self.recipe is not None:
            words = _printed(words, step.environment)
        if Path(words[0]).name == "fairseq-train":
            from fairseq_dpq.fairseq_plugin.building import parse_command

            parse_command(words[1:])

    def step(self, point: Point, folder: Path) -> Step:
        """The training of one point, whose files go to `folder`."""
        own = ["--save-dir", str(folder / CHECKPOINTS), "--log-format", "json"]
        own = [*point.flags(), *own, "--no-epoch-checkpoints"]
        # Of the user's flags of DPQ, those of the grid go; for the full table, all.
        grid = None if point.method is None else ("K", "D", "method", "share_subspaces")
        given = without(self.words, {**_DROPPED, **dpq_flags(grid)})
        if self.recipe is not None:
            words = ["sh", str(_TRAIN), self.recipe, point.method or "full", *given, *own]
            # The recipe's own sharing is turned off: each point has its own.
            environment = {"SHARE": "0", "PYTHON": sys.executable}
            return Step("train", [*self.launcher, *words], environment, resumes=True)
        is_train = Path(given[0]).name == "fairseq-train"
        if is_train and not any(word.split("=")[0] == "--user-dir" for word in given):
            own = ["--user-dir", str(_PACKAGE), *own]
        return Step("train", [*self.launcher, *given, *own], resumes=True)


def _printed(words: list[str], environment: dict[str, str]) -> list[str]:
    """The command that a recipe prints, without running it."""
    dry = {**os.environ, **environment, "DRY_RUN": "1"}
    done = subprocess.run(words, env=dry, capture_output=True, text=True)
    if done.returncode != 0:
        raise RunsError((done.stderr.strip() or "train.sh failed").splitlines()[-1])
    return shlex.split(done.stdout)


def dpq_flags(names: Sequence[str] | None = None) -> dict[str, bool]:
    """Flags of DPQ, all or some, each with whether it takes a value."""
    chosen = [f for f in flag_fields() if names is None or f.name in names]
    return {flag(f.name): option_type(f) is not bool for f in chosen}


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
