"""Builds the native library with the C compiler at hand; setup.py and scripts/setup_env.sh call it.

Standard library only: at build time neither torch nor this package can be imported.
Usage: python build.py [DIRECTORY]   (default: beside this file)
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Sequence

HERE = Path(__file__).resolve().parent
NAME = "libdpq.so"
SHARED = ("dispatch.c", "threads.c")  # compiled once
KERNELS = (
    *("lookup.c", "logits.c", "logits_permute.c", "codes.c", "gradients.c", "packing.c"),
    *("clusters.c", "variant.c"),
)
# Codes are defined by single rounded operations: no fused multiply-add, no reassociation.
FLAGS = (
    *("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi"),
)
X86_VARIANTS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mbmi2", "-mf16c"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mbmi2", "-mf16c"),
        "-mprefer-vector-width=512",
    ),
}


def source_hash() -> str:
    """A hash of all C sources, which the library carries: a stale one is noticed."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.c"), *HERE.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compiler() -> list[str] | None:
    """The C compiler's command: CC, or the first of cc, gcc and clang; None without any."""
    if os.name != "posix":
        return None
    candidates = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for candidate in candidates:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None


def compile_objects(cc: Sequence[str], work: Path, flags: Sequence[str]) -> list[str]:
    """Compile every source, the kernels once per instruction set."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    variants = X86_VARIANTS if x86 else {"baseline": ()}
    shared = [f'-DDPQ_HASH="{source_hash()}"', *(["-DDPQ_X86_VARIANTS"] if x86 else [])]
    jobs = [(source, "", shared) for source in SHARED]
    for variant, extra in variants.items():
        jobs += [(source, variant, [f"-DDPQ_VARIANT={variant}", *extra]) for source in KERNELS]
    objects = []
    for source, variant, own in jobs:
        target = work / f"{Path(source).stem}{variant}.o"
        run([*cc, *flags, *own, "-c", str(HERE / source), "-o", str(target)])
        objects.append(str(target))
    return objects


def build(directory: Path, cc: Sequence[str]) -> Path:
    """Build the library into `directory`, whole or not at all."""
    target = directory / NAME
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        objects = compile_objects(cc, work, FLAGS)
        run([*cc, "-shared", "-o", str(work / NAME), *objects, "-lm", "-lpthread"])
        directory.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{NAME}.{os.getpid()}")
        shutil.copy(work / NAME, partial)
        partial.replace(target)
    return target


def run(command: Sequence[str]) -> None:
    """Run a compiler; its messages are part of the error."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout}")
    if done.stdout:
        print(done.stdout, end="", file=sys.stderr)


def main(arguments: Sequence[str]) -> None:
    directory = Path(arguments[0]) if arguments else HERE
    cc = compiler()
    if cc is None:
        print("no C compiler (cc, gcc or clang): lookups will use PyTorch, which is slower")
        return
    try:
        print(f"built {build(directory, cc)}")
    except (RuntimeError, OSError) as error:
        print(f"the native library was not built; PyTorch is used, which is slower: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
