"""Builds the native library's sources with sanitizers together with fuzz.c and runs the result:
first for addresses and undefined behaviour, then for races between threads.
Usage: python tests/native/sanitize.py [ROUNDS [SEED]]"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "fairseq_dpq" / "native"
CHECKS = {
    "address, undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
# Races are the same in all instruction sets; the best one here has all threads' code paths.
VARIANTS = {"address, undefined": ("baseline", "avx2", "avx512"), "thread": ("avx512",)}


def main(rounds: str, seed: str) -> int:
    build = runpy.run_path(str(NATIVE / "build.py"))
    cc = build["compiler"]()
    if cc is None:
        print("no C compiler")
        return 1
    for kind, checks in CHECKS.items():
        flags = [
            *build["FLAGS"],
            "-g",
            "-O1",
            "-fno-omit-frame-pointer",
            "-DDPQ_SHARE_ALL",
            *checks,
        ]
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            objects = build["compile_objects"](cc, work, flags)
            program = work / "fuzz"
            source = str(HERE / "fuzz.c")
            link = [*cc, *flags, f"-I{NATIVE}", source, *objects, "-o", str(program), "-lm"]
            build["run"]([*link, "-lpthread"])
            for variant in VARIANTS[kind]:
                own = {"FAIRSEQ_DPQ_NATIVE_VARIANT": variant}
                own["TSAN_OPTIONS"] = "halt_on_error=1 die_after_fork=0"
                command = [str(program), rounds, seed]
                print(f"{kind}: ", end="", flush=True)
                code = subprocess.run(command, env={**os.environ, **own}).returncode
                if code:
                    return code
    return 0


if __name__ == "__main__":
    rounds, seed = [*sys.argv[1:3], *["1000", "0"][len(sys.argv) - 1 :]]
    sys.exit(main(rounds, seed))
