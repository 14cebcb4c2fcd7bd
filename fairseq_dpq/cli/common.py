"""What all tools share: options, errors in one line."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Callable, Sequence

from fairseq_dpq.files.errors import CheckpointError, DPQConfigError, printable

# Modules that `pip install fairseq-dpq` does not bring, by the extra of setup.py that does.
_EXTRAS = {
    "fairseq": ("fairseq", "fairseq_cli", "hydra", "omegaconf", "sacrebleu", "sentencepiece"),
    "plots": ("matplotlib",),
    "transformers": ("transformers",),
    "triton": ("triton",),
}


def add_common(parser: argparse.ArgumentParser, output: str = "") -> None:
    """Options that every tool has; `output` is what one that writes a file calls it."""
    if output:
        parser.add_argument("--force", action="store_true", help=f"replace {output} if it exists")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle everything in the input, which can run code that is hidden in it",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_exact_logits(parser: argparse.ArgumentParser) -> None:
    """The option of the tools that write compact checkpoints."""
    parser.add_argument(
        "--exact-logits",
        action="store_true",
        help="let tied output layers multiply by the dense table, which takes its memory; else "
        "logits come from the codes, faster, and differ in the last digits",
    )


def missing_extra(error: ModuleNotFoundError) -> str:
    """What to install for a module that belongs to an extra; empty for any other module."""
    name = (error.name or "").split(".")[0]
    extra = next((extra for extra, modules in _EXTRAS.items() if name in modules), None)
    return f"{name} is not installed; pip install 'fairseq-dpq[{extra}]' brings it" if extra else ""


def tool(
    get_parser: Callable[[], argparse.ArgumentParser],
    work: Callable[[argparse.Namespace], None],
    command: bool = False,
) -> Callable[..., int]:
    """The `main` of a tool: it takes the command line and returns the exit code, 2 for bad input,
    which is one line. With `command`, what follows `--` becomes `args.command`."""

    def main(argv: Sequence[str] | None = None) -> int:
        given = list(sys.argv[1:] if argv is None else argv)
        at = given.index("--") if command and "--" in given else len(given)
        parser = get_parser()
        args = parser.parse_intermixed_args(given[:at])  # options may stand anywhere
        args.command = given[at + 1 :]
        level = logging.root.manager.disable
        if not args.debug:
            logging.disable(logging.INFO)  # what fairseq says while it loads a model
        try:
            work(args)
            return 0
        except KeyboardInterrupt:
            print(f"{parser.prog}: interrupted; nothing was written", file=sys.stderr)
            return 130
        except BrokenPipeError:
            return 1
        except Exception as error:
            problem = _problem(error)
            if args.debug:
                raise
            print(f"{parser.prog}: {problem or _unexpected(error)}", file=sys.stderr)
            return 2 if problem else 1
        finally:
            logging.disable(level)

    return main


def _problem(error: Exception) -> str:
    """What is wrong with the input, in a line; empty if it is not the input."""
    if isinstance(error, (CheckpointError, DPQConfigError)):
        return f"error: {printable(error)}"
    if isinstance(error, RecursionError):
        return "error: the input is nested too deeply"
    if isinstance(error, MemoryError):
        return "error: the input needs more memory than there is"
    extra = missing_extra(error) if isinstance(error, ModuleNotFoundError) else ""
    return f"error: {extra}" if extra else ""


def _unexpected(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"unexpected {type(error).__name__}: {printable(first)} (--debug shows where)"
