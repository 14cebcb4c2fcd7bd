"""Builds the native library's sources with sanitizers together with fuzz.c and runs the result.
Usage: python tests/native/sanitize.py [ROUNDS]"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "fairseq_dpq" / "native"
CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def main(rounds: str) -> int:
    build = runpy.run_path(str(NATIVE / "build.py"))
    cc = build["compiler"]()
    if cc is None:
        print("no C compiler")
        return 1
    flags = [*build["FLAGS"], "-g", "-O1", *CHECKS]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        objects = build["compile_objects"](cc, work, flags)
        program = work / "fuzz"
        source = str(HERE / "fuzz.c")
        link = [*cc, *flags, f"-I{NATIVE}", source, *objects, "-o", str(program), "-lm"]
        build["run"]([*link, "-lpthread"])
        for variant in ("baseline", "avx2", "avx512"):
            environment = {**os.environ, "FAIRSEQ_DPQ_NATIVE_VARIANT": variant}
            code = subprocess.run([str(program), rounds], env=environment).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "3000"))
