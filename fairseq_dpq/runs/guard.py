"""Run as a script: starts one command and sees to it that nothing of it outlives the runner.

guard.py FOLDER COMMAND...: stdin is a pipe that the runner holds open. When the runner ends in any
way, SIGKILL included, the pipe closes, and the guard ends its whole process group. The file
FOLDER/usage.json gets the command's seconds, CPU seconds and peak memory. It imports the standard
library only, because it starts for every command.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time

GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """On Linux: if the guard itself is killed, so is the run."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(child: subprocess.Popen) -> None:
    """SIGTERM to the group, and SIGKILL to what is left; the guard dies with it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    usage, command = os.path.join(sys.argv[1], "usage.json"), sys.argv[2:]
    # Held to the end: the guard of a killed runner may still be ending a command in this folder.
    lock = os.open(os.path.join(sys.argv[1], ".running"), os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    started = time.monotonic()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", flush=True)
        return 127
    while child.poll() is None:
        # Nothing is ever written: readable means closed.
        if select.select([sys.stdin], [], [], 0.1)[0]:
            end_group(child)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = {
        "seconds": time.monotonic() - started,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        # kilobytes on Linux, bytes on macOS
        "peak_bytes": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }
    with open(usage, "w") as file:
        json.dump(facts, file)
    code = child.returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    # Only a group of its own may be killed.
    assert os.getpgrp() == os.getpid()
    sys.exit(main())
