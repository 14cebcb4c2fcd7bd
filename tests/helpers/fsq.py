"""Helpers for tests that run fairseq: toy corpora, commands in a subprocess, commands in-process.
Everything is seeded and small; nothing here knows about DPQ beyond the plugin's directory.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator, Mapping, Sequence

import fairseq
import torch

# What --user-dir needs: the directory of the package that `import fairseq_dpq` finds. fairseq
# refuses a second directory of the same name, so tests should not spell the path themselves.
USER_DIR = str(
    next(iter(importlib.util.find_spec("fairseq_dpq").submodule_search_locations))  # type: ignore
)

# For `run`: a child process that imports these helpers.
WITH_HELPERS = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")])
    )
}

# Flags for a model and a run small enough for a second on one core.
SMALL = shlex.split(
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2"
)
QUICK = shlex.split(
    "--cpu --max-update 6 --max-epoch 1 --max-tokens 600 --optimizer adam --lr 1e-3 "
    "--no-progress-bar --log-format simple --num-workers 0"
)

TINY = [*SMALL, *QUICK, "--dropout", "0", "--disable-validation"]

SPLITS = ("train", "valid", "test")


def torch_at_least(*version: int) -> bool:
    """Whether the torch at hand is of this version (major, minor) or later."""
    return tuple(int(v) for v in torch.__version__.split(".")[:2]) >= version


def learned(model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's model that training decides. fairseq 0.12.2 also saves buffers
    that it never fills (`_float_tensor`) and copies of weights that it makes at loading only."""
    if fairseq.__version__ != "0.12.2":
        return dict(model)
    other = re.compile(r"_float_tensor$|\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)$")
    return {name: tensor for name, tensor in model.items() if not other.search(name)}


def write_corpus(
    root: Path | str,
    n_lines: int = 200,
    n_valid: int = 40,
    n_test: int = 40,
    vocab: int = 60,
    seed: int = 1,
    langs: Sequence[str] = ("src", "tgt"),
) -> Path:
    """Write `{train,valid,test}.{lang}` under `root/txt` and return that directory.

    The first language is drawn with a Zipf-like law, 3 to 12 words a line. The second one is its
    word-for-word translation in reversed order, so that a model can learn it.
    """
    txt = Path(root) / "txt"
    txt.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    weights = [1.0 / (1 + i) for i in range(vocab)]
    for split, n in zip(SPLITS, (n_lines, n_valid, n_test)):
        lines = [rng.choices(range(vocab), weights=weights, k=rng.randint(3, 12)) for _ in range(n)]
        for i, lang in enumerate(langs):
            prefix = "ab"[i]
            rows = [line if i == 0 else line[::-1] for line in lines]
            text = "".join(" ".join(f"{prefix}{w}" for w in row) + "\n" for row in rows)
            (txt / f"{split}.{lang}").write_text(text)
    return txt


def make_corpus(
    root: Path | str,
    n_lines: int = 200,
    n_valid: int = 40,
    n_test: int = 40,
    vocab: int = 60,
    seed: int = 1,
    joined: bool = False,
) -> Path:
    """A seeded parallel corpus src -> tgt, binarised by fairseq-preprocess into `root/bin`."""
    txt = write_corpus(root, n_lines, n_valid, n_test, vocab, seed)
    dest = Path(root) / "bin"
    argv = ["--source-lang", "src", "--target-lang", "tgt", "--destdir", str(dest)]
    for split in SPLITS:
        argv += [f"--{split}pref", str(txt / split)]
    if joined:
        argv.append("--joined-dictionary")
    main("preprocess", argv)
    return dest


def make_lm_corpus(
    root: Path | str,
    n_lines: int = 200,
    n_valid: int = 40,
    n_test: int = 40,
    vocab: int = 60,
    seed: int = 1,
) -> Path:
    """A seeded monolingual corpus, binarised by fairseq-preprocess into `root/lm`."""
    txt = write_corpus(root, n_lines, n_valid, n_test, vocab, seed, langs=("mono",))
    dest = Path(root) / "lm"
    argv = ["--only-source", "--destdir", str(dest)]
    for split in SPLITS:
        argv += [f"--{split}pref", str(txt / f"{split}.mono")]
    main("preprocess", argv)
    return dest


def script(name: str) -> str:
    """Path of a console script (fairseq-train, torchrun, ...) of this very interpreter."""
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name


def free_port() -> str:
    """A port of this host where workers can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(
    cmd: Sequence[str],
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    ok: bool | None = True,
    input: str | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess:
    """Run a command in a subprocess on one thread; stdout and stderr are text.

    `env` is added to the environment. `ok=True` fails the test when the command fails, `ok=False`
    when it succeeds, `ok=None` leaves the return code to the caller.
    """
    cmd = [script(str(cmd[0])), *map(str, cmd[1:])]
    full_env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(env or {})}
    # Files, not pipes: what a killed command has started may keep those open.
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        files = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": stderr}
        problem = ""
        with subprocess.Popen(cmd, cwd=cwd, env=full_env, text=True, **files) as process:
            try:
                process.communicate(input or "", timeout)
            except subprocess.TimeoutExpired:
                problem = f"still running after {timeout:.0f} s"
                process.terminate()  # torchrun then ends its workers
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(40)
                process.kill()
        out, err = (file.seek(0) or file.read() for file in (stdout, stderr))
    code = process.returncode
    if not problem and ok is not None and (code == 0) != ok:
        problem = f"expected to {'succeed' if ok else 'fail'}, got return code {code}"
    if problem:
        raise AssertionError(
            f"{problem}: {' '.join(cmd)}\n"
            f"--- stdout (end)\n{out[-3000:]}\n--- stderr (end)\n{err[-5000:]}"
        )
    return subprocess.CompletedProcess(cmd, code, out, err)


@contextlib.contextmanager
def _patched_argv(argv: Sequence[str], stdin: str | None) -> Iterator[None]:
    old_argv, old_stdin = sys.argv, sys.stdin
    sys.argv = list(argv)
    if stdin is not None:
        sys.stdin = io.StringIO(stdin)
    try:
        yield
    finally:
        sys.argv, sys.stdin = old_argv, old_stdin


def main(command: str, argv: Sequence[str], input: str | None = None) -> str:
    """Run `fairseq-COMMAND ARGV` inside this process and return its log and output as one text.

    `command` is preprocess, train, generate, interactive, validate or eval_lm. No three seconds of
    start-up, but the plugin's patches stay in this process: to see stock fairseq use `run`.
    """
    import torch

    command = command.replace("fairseq-", "").replace("-", "_")
    module = importlib.import_module(f"fairseq_cli.{command}")
    if command == "train":
        from fairseq import checkpoint_utils

        # fairseq keeps the best score of a process here; this is a run of its own
        checkpoint_utils.save_checkpoint.__dict__.pop("best", None)
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s | %(name)s | %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(out), _patched_argv(
            [f"fairseq-{command.replace('_', '-')}", *map(str, argv)], input
        ):
            module.cli_main()
    except BaseException:
        sys.stderr.write(out.getvalue()[-5000:])
        raise
    finally:
        torch.set_num_threads(threads)
        root.removeHandler(handler)
        root.setLevel(level)
    return out.getvalue()


def weights(path: Path | str) -> dict:
    """The tensors of a checkpoint's model; the plugin must have been imported."""
    import torch

    return torch.load(path, map_location="cpu")["model"]


def logged(text: str, key: str) -> list[float]:
    """Values of `key` in a log of `--log-format simple`; e.g. key=r"valid on .* \\| loss"."""
    return [float(v) for v in re.findall(rf"{key}[ =](-?[0-9.]+(?:e-?\d+)?)", text)]
