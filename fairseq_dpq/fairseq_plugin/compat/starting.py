"""Patches of how fairseq starts: its warnings, and `--user-dir`."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable

from .patching import replace

# (start of the message, category, module it is attributed to). Only warnings that a fairseq user
# cannot act on: a message that names the user's flags or files does not belong here.
_NOISE: tuple[tuple[str, type, str], ...] = (
    (r"hydra\.experimental\.\w+\(\) is no longer experimental", UserWarning, r"hydra\."),
    (r"\s*The version_base parameter is not specified", UserWarning, r"hydra\."),
    (r"In '.*': Usage of deprecated keyword in package header", UserWarning, r"hydra\."),
    # Attributed to a frame far above hydra: the user's script, or nothing at all.
    (r"\s*'config' is validated against ConfigStore schema", UserWarning, ""),
    (r"\s*The strict flag in the compose API is deprecated", UserWarning, r"hydra\."),
    (
        r"'pin_memory' argument is set as true but no accelerator",
        UserWarning,
        r"torch\.utils\.data",
    ),
    # fairseq passes its own --broadcast-buffers to DistributedDataParallel
    (r"`broadcast_buffers` is deprecated", FutureWarning, r"fairseq"),
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", FutureWarning, r"(fairseq|torch)"),
    (r"Support for mismatched key_padding_mask and", UserWarning, r"torch\.nn"),
    (r"`torch\.nn\.utils\.weight_norm` is deprecated", FutureWarning, r"torch\.nn"),
    (r"Using non-full backward hooks on a Module that does not", Warning, r"torch\.nn"),
    # torch < 2: at every start on CPU, whatever the precision.
    (r"User provided device_type of 'cuda', but CUDA is not available", UserWarning, r"torch\."),
)


def warning_noise() -> bool:
    """hydra >= 1.1 and torch >= 2 warn about fairseq's code about ten times per run.

    Nothing breaks without it, but the noise hides warnings that matter. Each warning is matched by
    its message and the module it is attributed to. The same message from the user's code is shown.
    """
    before = len(warnings.filters)
    for message, category, module in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    return len(warnings.filters) > before


def user_dir_again() -> bool:
    """`--user-dir fairseq_dpq` fails if this package is already imported, all versions.

    fairseq compares paths as strings, so it rejects `.../fairseq/../fairseq_dpq`, a symbolic link
    or the checkout's own path as `not globally unique`. Without it, a program or command that
    imports this package first cannot use the flag. The name of any other package that Python can
    import works too, and a name that nothing has is an error of one line.
    """
    from fairseq import utils

    package = Path(__file__).resolve().parents[2]  # fairseq_dpq, not this folder
    beside = os.path.dirname(os.path.abspath(utils.__file__))

    def make(old: Callable) -> Callable:
        @functools.wraps(old)
        def import_user_module(args: Any) -> None:
            name = getattr(args, "user_dir", None)
            if name is not None:
                places = [os.path.abspath(name), os.path.join(beside, name)]
                places.append(os.path.join(beside, "..", name))
                found = next((place for place in places if os.path.exists(place)), None)
                found = found or _package_folder(name)
                if found is None:
                    from fairseq_dpq.config import DPQConfigError

                    raise DPQConfigError(
                        f"--user-dir {name}: there is no such folder here or beside fairseq, and "
                        "no Python package of that name; the plugin is fairseq_dpq, in "
                        f"{package}"
                    )
                if os.path.samefile(found, package):
                    return
                args = Namespace(user_dir=found)
            old(args)

        return import_user_module

    return replace(utils, "import_user_module", make)


def _package_folder(name: str) -> str | None:
    """The folder of a package that Python can import."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    places = spec.submodule_search_locations if spec is not None else None
    return next(iter(places), None) if places else None
