"""The points of a sweep and their commands."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.runs.folder import RunsError
from fairseq_dpq.sweeps.grid import Base, Grid, Point, without

FULL = Point()


def test_points_are_every_combination_once_and_cheap_ones_first() -> None:
    grid = Grid([8, 2, 8], [4, 16], ["sx", "vq"])
    names = [point.name for point in grid.points()]
    assert names == [
        "full",
        *("sx-K2-D4", "vq-K2-D4", "sx-K2-D16", "vq-K2-D16"),
        *("sx-K8-D4", "vq-K8-D4", "sx-K8-D16", "vq-K8-D16"),
    ]
    both = Grid([2], [4], ["vq"], [True, False], full=False)
    assert [point.name for point in both.points()] == ["vq-K2-D4", "vq-K2-D4-shared"]


@pytest.mark.parametrize(
    ("K", "D", "message"),
    [
        (1, 4, "--dpq-K 1: must be from 2 to 32768; try 32"),
        (8, 0, "--dpq-D 0: must be 1 or more; try 16"),
    ],
)
def test_refused(K: int, D: int, message: str) -> None:
    with pytest.raises(RunsError, match=message):
        Grid([K], [D], ["sx"]).points()


def test_flags() -> None:
    flags = "--dpq-K 8 --dpq-D 4 --dpq-method vq --dpq-share-subspaces"
    assert Point("vq", 8, 4, True).flags() == flags.split()
    assert FULL.flags() == []


def test_without_takes_values_along() -> None:
    words = [
        "a",
        "--dpq-K",
        "8",
        "--dpq-K=9",
        "--dpq-share-subspaces",
        "--x",
        "1",
        "--save-dir",
        "y",
    ]
    flags = {"--dpq-K": True, "--dpq-share-subspaces": False, "--save-dir": True}
    assert without(words, flags) == ["a", "--x", "1"]


def test_command_of_a_point_and_of_the_full_table() -> None:
    """The grid's flags replace the user's; the full table has none of DPQ's."""
    words = "/bin/train data --arch x --dpq-K=32 --dpq-tau 1 --dpq-commitment 0.1 --no-save"
    base = Base((*words.split(), "--adam-betas", "(0.9, 0.98)", "--save-dir", "old"))
    command = base.step(Point("sx", 2, 4), Path("out/sx"))
    ours = "--save-dir out/sx/checkpoints --log-format json --no-epoch-checkpoints"
    start = "/bin/train data --arch x"
    grid = "--dpq-K 2 --dpq-D 4 --dpq-method sx"
    assert str(command) == (
        f"{start} --dpq-tau 1 --dpq-commitment 0.1 --adam-betas '(0.9, 0.98)' {grid} {ours}"
    )
    full = str(base.step(FULL, Path("out/sx")))
    assert full == f"{start} --adam-betas '(0.9, 0.98)' {ours}"
    with_launcher = Base(base.words, launcher=("nice", "-n", "5"))
    assert with_launcher.step(FULL, Path("o")).words[:4] == ["nice", "-n", "5", "/bin/train"]


def test_recipe_gives_the_commands_of_its_script(tmp_path: Path) -> None:
    """train.sh takes the grid's flags last; its own sharing is off unless the point shares."""
    base = Base(("--cpu",), recipe="ptb_small")
    base.check(FULL, tmp_path)
    for point, shares in ((Point("vq", 4, 10), 0), (Point("vq", 4, 10, True), 1)):
        command = base.step(point, tmp_path)
        assert command.environment == {"SHARE": "0", "PYTHON": sys.executable}
        done = subprocess.run(
            [
                "env",
                "DRY_RUN=1",
                *[f"{k}={v}" for k, v in command.environment.items()],
                *command.words,
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        words = shlex.split(done.stdout)
        assert words.count("--dpq-share-subspaces") == shares
        last = {
            flag: words[len(words) - words[::-1].index(flag)] for flag in ("--dpq-K", "--dpq-D")
        }
        assert last == {"--dpq-K": "4", "--dpq-D": "10"}
        assert words[len(words) - words[::-1].index("--save-dir")] == str(tmp_path / "checkpoints")


def test_commands_that_cannot_be_swept(tmp_path: Path) -> None:
    for base, message in (
        (Base(()), "give --recipe NAME, or a command"),
        (Base(("fairseq-hydra-train",)), "give a fairseq-train command"),
        (Base((), recipe="none"), "--recipe none: choose one of .*iwslt15-en-vi"),
        (
            Base(("fairseq-train", "data", "--arch", "transformr")),
            "fairseq-train refuses the command: .*invalid choice: 'transformr'",
        ),
        (
            Base(("fairseq-train", "data", "--arch", "transformer", "--criterion", "cross")),
            "fairseq-train refuses the command: .*invalid choice: 'cross'",
        ),
        (
            Base(("fairseq-train", "data", "--arch", "transformer", "--no-such-flag")),
            "fairseq-train refuses the command: .*--no-such-flag",
        ),
        (Base(("--arch", "x"), recipe="ptb_small"), "invalid choice: 'x'"),
    ):
        with pytest.raises((RunsError, DPQConfigError), match=message):
            base.check(FULL, tmp_path)


def test_the_plugin_is_added_and_the_command_parsed(tmp_path: Path) -> None:
    """The command of --help has no --user-dir. DPQ's flags need it."""
    base = Base(("fairseq-train", "data", "--arch", "transformer"))
    base.check(Point("vq", 8, 4), tmp_path)
    words = base.step(FULL, tmp_path).words
    assert Path(words[words.index("--user-dir") + 1]).name == "fairseq_dpq"
    own = Base(("fairseq-train", "data", "--arch", "transformer", "--user-dir=mine"))
    assert "--user-dir" not in own.step(FULL, tmp_path).words
    assert "--user-dir" not in Base(("my-own-train", "data")).step(FULL, tmp_path).words
