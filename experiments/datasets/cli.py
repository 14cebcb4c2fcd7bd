"""What all data sets share: the command line, its exit codes and the run itself.

`DataSet` is what one of them says about itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Callable, ClassVar, Sequence

from experiments.datasets import PrepareError
from experiments.datasets.binarize import require_fairseq
from experiments.datasets.checksums import Checks, hash_files, read_checksum_file
from experiments.datasets.download import Downloader
from experiments.datasets.folders import Result, build_folder, check_replaceable, find_out
from experiments.datasets.sources import RequiredFile, Sources
from fairseq_dpq.runs.folder import RunsError, locked


class DataSet:
    """A data set: its flags, its files, and how they become a folder for fairseq."""

    title: str
    description: ClassVar[str]  # of the command; {} stands for the title
    downloads: ClassVar[bool] = True  # whether it has the flags of downloads
    optional: ClassVar[str] = ""  # the flag that leaves out a part of it

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Flags of its own."""

    def options(self, run: Run) -> Result:
        """What the flags ask for, checked; a folder made with other values is made again."""
        return {}

    def files(self, run: Run) -> list[RequiredFile]:
        """The files that --from must have."""
        return []

    def build(self, run: Run, folder: Path) -> list[str]:
        """Fill a new folder, whose subfolder `scratch` is removed; the report, which is printed
        last and kept in the stamp."""
        raise NotImplementedError


def split_commas(text: str) -> list[str]:
    """The names in the value of a flag."""
    return [part.strip() for part in text.split(",") if part.strip()]


def at_least(args: argparse.Namespace, **lowest: float) -> None:
    """PrepareError for a number that is too small; keys are names of flags."""
    for flag, least in lowest.items():
        value = getattr(args, flag)
        if value < least:
            raise PrepareError(f"--{flag.replace('_', '-')} {value}: must be at least {least}")


def make_parser(name: str, data: DataSet) -> argparse.ArgumentParser:
    """The flags that every data set has, those of downloads, and its own."""
    text = data.description.format(data.title)
    parser = argparse.ArgumentParser(prog=f"prepare.sh {name}", description=text)
    add = parser.add_argument
    add("--out", type=Path, default=Path("data-bin") / name, metavar="DIR",
        help="binarised data (default: %(default)s)")  # fmt: skip
    add("--work", type=Path, default=Path("data") / name, metavar="DIR",
        help="downloads and intermediate files (default: %(default)s)")  # fmt: skip
    # In a container, a process often may use fewer cores than the machine has.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--workers", type=int, default=allowed or 1, metavar="N",
        help="processes (default: all cores, here %(default)s)")  # fmt: skip
    add("--force", action="store_true", help="rebuild even if nothing has changed")
    add("--keep", action="store_true", help="keep extracted and intermediate files in --work")
    if data.downloads:
        add("--from", dest="from_dir", type=Path, metavar="DIR",
            help="use the files (or archives) in DIR, without network")  # fmt: skip
        add("--mirror", "--base-url", dest="mirrors", action="append", default=[], metavar="URL",
            help="download from URL instead of the built-in addresses; may be repeated"
            )  # fmt: skip
        add("--checksums", type=Path, metavar="FILE",
            help="sha256sum/md5sum lines that replace the built-in checksums")  # fmt: skip
        add("--no-checksum", nargs="?", const="*", default="", metavar="NAME,NAME",
            help="do not verify these files (all, if none is named); wrong counts then "
            "give a warning instead of an error")  # fmt: skip
        add("--retries", type=int, default=4, metavar="N",
            help="retries of an address without progress (default: %(default)s)")  # fmt: skip
    else:
        parser.set_defaults(from_dir=None, mirrors=[], checksums=None, no_checksum="", retries=0)
    data.add_flags(parser)
    return parser


class Run:
    """One run of a prepare script: its flags, its sources, its output folder."""

    def __init__(self, name: str, data: DataSet, args: argparse.Namespace) -> None:
        at_least(args, workers=1, retries=0)
        for mirror in args.mirrors:
            if not mirror.startswith(("http://", "https://")):
                raise PrepareError(f"--mirror {mirror}: must begin with http:// or https://")
        self.name, self.data, self.args = name, data, args
        needed = {"the current folder": Path.cwd(), "--work": args.work}
        if args.from_dir is not None:
            needed["--from"] = args.from_dir
        self.out = find_out(args.out, needed)
        self.work: Path = args.work
        self.workers: int = args.workers
        override = read_checksum_file(args.checksums) if args.checksums else {}
        skip = frozenset(split_commas(args.no_checksum))
        self.checks = Checks(skip, override)
        downloader = Downloader(
            self.work / "downloads", self.checks, args.mirrors, retries=args.retries
        )
        self.sources = Sources(args.from_dir, self.work, downloader, data.optional)

    def expect(self, what: str, got: Any, expected: Any) -> None:
        """Compare with a documented figure: an error, but for files that need not be the documented
        ones a warning."""
        if got == expected:
            return
        message = f"{what}: {got}, documented is {expected}"
        if not self.checks.skip and not self.checks.override:
            raise PrepareError(f"{message}; --no-checksum takes the files as they are")
        self.say(f"warning: {message}")

    def say(self, message: str) -> None:
        print(f"| {message}", flush=True)

    def stage(self, name: str, key: Result, build: Callable[[Path], Result]) -> tuple[Path, Result]:
        """A folder of intermediate files, which an interrupted run need not make again, and its
        result."""
        folder = self.work / "stages" / name
        return folder, build_folder(folder, key, build, self.args.force)[0]

    def prepare(self) -> None:
        """Hold --out, which need not exist yet, and --work, which is removed if it stays empty."""
        out, work = self.out, self.work
        wait = "wait for it, or pass another"
        writing = f"another run is writing --out {out}; {wait} --out and --work"
        using = f"another run is using --work {work}; {wait} --work and --out"
        with locked(out.with_name(f".{out.name}.lock"), writing), locked(work / ".lock", using):
            try:
                self._prepare()
            finally:
                with contextlib.suppress(OSError):
                    (work / "downloads").rmdir()

    def _prepare(self) -> None:
        """Create --out, unless it was already built from the same files and options.

        With --from the files themselves are compared. Without it the options are compared, which
        include the checksums of the addresses: the downloads may have been deleted. The stamp's
        result names the files that were used.
        """

        def build(folder: Path) -> Result:
            result: Result = {"report": self.data.build(self, folder)}
            if self.args.from_dir is None:
                result["inputs"] = hash_files(self.sources.used.values())
            return result

        options = self.data.options(self)
        check_replaceable(self.out)
        override = {name: digest[1:] for name, digest in self.checks.override.items()}
        options.update(no_checksum=sorted(self.checks.skip), checksums=override)
        key: Result = {"dataset": self.name, "options": options}
        if self.args.from_dir is not None:
            self.sources.local(self.data.files(self))
            key["inputs"] = hash_files(self.sources.used.values())
        result, built = build_folder(self.out, key, build, self.args.force)
        if not self.args.keep:
            for name in ("extracted", "stages"):
                shutil.rmtree(self.work / name, ignore_errors=True)
        state = "done" if built else "up to date, nothing to do"
        for line in [*result.get("report", []), f"{self.args.out}: {state}"]:
            self.say(line)


def run_main(name: str, data: DataSet, argv: Sequence[str] | None = None) -> int:
    """Prepare a data set; the exit code: 0 done, 2 a one-line error, 130 interrupted."""
    parser = make_parser(name, data)
    args = parser.parse_args(argv)
    try:
        # As on Ctrl-C, so that unfinished folders are removed on `kill` too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        require_fairseq()
        Run(name, data, args).prepare()
    except (PrepareError, RunsError, OSError) as error:
        text = " ".join(str(error).split())
        print(f"{parser.prog}: error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; run it again to continue", file=sys.stderr)
        return 130
    return 0
