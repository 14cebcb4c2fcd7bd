"""The command of each run: the user's own, or a recipe, with the flags of the point."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import fairseq_dpq
from fairseq_dpq.config import flag, option_type
from fairseq_dpq.fairseq_plugin.options import flag_fields
from fairseq_dpq.runs.folder import RunsError
from fairseq_dpq.runs.runner import Step
from fairseq_dpq.sweeps.grid import Point

_PACKAGE = Path(fairseq_dpq.__file__).resolve().parent
_ROOT = _PACKAGE.parent
_TRAIN = _ROOT / "scripts" / "train.sh"
# Flags that the sweep sets, and those that would keep it from reading results or going on.
_OWN = {"--save-dir": True, "--log-format": True, "--log-file": True}
_LOST = {"--no-save": False, "--no-last-checkpoints": False}
CHECKPOINTS = "checkpoints"


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
            if not _TRAIN.is_file():
                raise RunsError(
                    f"--recipe {self.recipe}: recipes are in the checkout of fairseq-dpq, not in "
                    "the installed package; give the fairseq-train command after --"
                )
            if not (_ROOT / "recipes" / f"{self.recipe}.conf").is_file():
                names = sorted(path.stem for path in (_ROOT / "recipes").glob("*.conf"))
                raise RunsError(f"--recipe {self.recipe}: choose one of {', '.join(names)}")
        elif not self.words:
            raise RunsError("give --recipe NAME, or a command: -- fairseq-train DATA --arch ...")
        elif any("hydra-train" in word for word in self.words[:4]):
            raise RunsError("fairseq-hydra-train has other flags; give a fairseq-train command")
        step = self.step(point, folder)
        words = step.words[len(self.launcher) :]
        if self.recipe is not None:
            words = _printed(words, step.environment)
        if Path(words[0]).name == "fairseq-train":
            parse(words[1:])

    def step(self, point: Point, folder: Path) -> Step:
        """The training of one point, whose files go to `folder`."""
        own = ["--save-dir", str(folder / CHECKPOINTS), "--log-format", "json"]
        own = [*point.flags(), *own, "--no-epoch-checkpoints"]
        given = without(self.words, {**_OWN, **_LOST, **_dpq_flags(point)})
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


def parse(words: Sequence[str]) -> Any:
    """The options of fairseq-train; RunsError with its own message for what it would refuse."""
    from fairseq import options

    import fairseq_dpq.fairseq_plugin  # noqa: F401 - its flags

    said, old = io.StringIO(), sys.argv
    sys.argv = ["fairseq-train", *words]  # --user-dir is read from there
    try:
        with contextlib.redirect_stderr(said):
            return options.parse_args_and_arch(options.get_training_parser(), list(words))
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["error: it cannot be parsed"]
        raise RunsError(f"fairseq-train refuses the command: {lines[-1]}") from None
    except (ValueError, OSError, ImportError) as error:
        raise RunsError(f"fairseq-train refuses the command: {error}") from error
    finally:
        sys.argv = old


def _dpq_flags(point: Point) -> dict[str, bool]:
    """Flags to remove, with whether each takes a value: those of the grid; for the full table all
    of DPQ."""
    grid = ("K", "D", "method", "share_subspaces")
    return {
        flag(f.name): option_type(f) is not bool
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
