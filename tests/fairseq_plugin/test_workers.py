"""Workers on CPU: every way to start them, with two real gloo processes, and the errors of invalid
launches. The reference is one process with --update-freq 2.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import fairseq
import pytest
import torch

from fairseq_dpq.fairseq_plugin import workers
from helpers import fsq

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with toy data."""
    root = tmp_path_factory.mktemp("workers")
    fsq.make_corpus(root, n_lines=200, n_valid=20, n_test=20)
    return root


def assert_same_training(work: Path, name: str, updates: int) -> None:
    """The checkpoint of two workers equals one process with --update-freq 2 to float precision."""
    reference = work / f"single{updates}"
    if not reference.exists():
        argv = [str(work / "bin"), "--arch", "transformer", *fsq.TINY, *TWO_EPOCHS]
        argv += ["--max-update", str(updates), "--update-freq", "2", "--save-dir", str(reference)]
        fsq.main("train", argv)
    one = fsq.weights(reference / "checkpoint_last.pt")
    two = fsq.weights(work / name / "checkpoint_last.pt")
    assert one.keys() == two.keys()
    # 0.12.2 also saves uninitialised memory, and parameters of an inference path that stay zero
    # until a checkpoint is loaded.
    trained = [key for key in one if not key.endswith("_float_tensor") and one[key].any()]
    assert len(trained) > 40
    for key in trained:
        assert torch.allclose(one[key], two[key], atol=2e-5), key


# --max-tokens 300: eight batches an epoch, four updates of two workers.
TWO_EPOCHS = ["--max-tokens", "300", "--max-epoch", "2"]
LEGACY = ["--ddp-backend", "legacy_ddp"]


def two_workers(work: Path, name: str, *flags: str) -> list[str]:
    argv = ["fairseq-train", str(work / "bin"), "--user-dir", fsq.USER_DIR]
    argv += ["--arch", "transformer", *fsq.TINY, *TWO_EPOCHS, "--save-dir", str(work / name)]
    return [*argv, *flags]


def start_both(work: Path, command: list[str], envs: list[dict]) -> list[str]:
    """Start one process per environment, `RANK` in the command replaced; return their outputs."""
    processes = [
        subprocess.Popen(
            [fsq.script(command[0]), *(a.replace("RANK", str(r)) for a in command[1:])],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            cwd=work,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for r, env in enumerate(envs)
    ]
    try:
        outputs = [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0] * len(envs), "\n".join(outputs)
    return outputs


def torchrun(work: Path, command: list[str]) -> subprocess.CompletedProcess:
    port = fsq.free_port()
    launch = ["torchrun", "--nproc_per_node", "2", "--master_port", port, "--no_python"]
    return fsq.run([*launch, fsq.script(command[0]), *command[1:]], cwd=work)


def test_torchrun_then_resumed_by_hand(work: Path) -> None:
    """Plain torchrun with legacy_ddp for two updates; then two processes started by hand resume
    it (so that rank 1 loads a checkpoint too) under pytorch_ddp for two more."""
    log = torchrun(work, two_workers(work, "two", "--max-update", "2", *LEGACY))
    assert log.stdout.count("training on 2 devices") == 1, "rank 1 must not train on its own"
    assert_same_training(work, "two", 2)
    command = two_workers(work, "two", "--max-update", "4", "--ddp-backend", "pytorch_ddp")
    if fairseq.__version__ == "0.12.2":  # has parameters that only inference uses
        command.append("--find-unused-parameters")
    command += [
        "--distributed-init-method",
        f"tcp://127.0.0.1:{fsq.free_port()}",
        "--distributed-rank",
    ]
    command += ["RANK", "--distributed-world-size", "2", "--distributed-no-spawn"]
    log = start_both(work, command, [{}, {}])[0]
    assert "Loaded checkpoint" in log and "num_updates 4" in log
    assert_same_training(work, "two", 4)


def slurm(tmp: Path, tasks: int = 2, rank: int = 0) -> dict[str, str]:
    """Slurm's variables of one task, and a scontrol that names this host."""
    bin_dir = tmp / "slurm_bin"
    bin_dir.mkdir(exist_ok=True)
    (bin_dir / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (bin_dir / "scontrol").chmod(0o755)
    return {
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "SLURM_STEP_NODELIST": "node[1]",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def test_workers_started_by_srun(work: Path) -> None:
    flags = ["--distributed-world-size", "2", "--distributed-port", fsq.free_port()]
    command = two_workers(work, "slurm", "--max-update", "2", *LEGACY, *flags)
    start_both(work, command, [slurm(work, rank=r) for r in (0, 1)])
    assert_same_training(work, "slurm", 2)


@pytest.mark.parametrize(("dead", "backend"), [(0, "legacy_ddp"), (1, "pytorch_ddp")])
def test_a_worker_that_dies_ends_the_other(work: Path, dead: int, backend: str, tmp_path) -> None:
    """Nobody watches them, as torchrun would; the kernel's lack of memory kills so."""
    command = two_workers(work, str(tmp_path), "--max-update", "99999", "--max-epoch", "9999")
    command += ["--log-interval", "1", "--no-save", "--ddp-backend", backend]
    command += ["--dpq-K", "8", "--dpq-D", "4", "--dpq-embeddings", "all"]
    if fairseq.__version__ == "0.12.2" and backend == "pytorch_ddp":
        command.append("--find-unused-parameters")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": fsq.free_port(), "WORLD_SIZE": "2"}
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            own = {**os.environ, **env, "OMP_NUM_THREADS": "1", "RANK": str(rank)}
            words = [fsq.script(command[0]), *command[1:]]
            processes.append(subprocess.Popen(words, env=own, stdout=out, stderr=out))
    try:
        end = time.monotonic() + 200
        while "num_updates=3," not in logs[0].read_text():
            assert time.monotonic() < end and processes[0].poll() is None, logs[0].read_text()
            time.sleep(0.1)
        processes[dead].kill()
        killed = time.monotonic()
        assert processes[1 - dead].wait(60) not in (0, None), logs[1 - dead].read_text()
        print(f"rank {1 - dead} ended after {time.monotonic() - killed:.1f} seconds")
    finally:
        for process in processes:
            process.kill()
            process.wait()


WORLD = "--distributed-world-size"
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
BY_HAND = ["--distributed-init-method", "tcp://127.0.0.1:29566", WORLD, "2"]
NO_SPAWN = [*BY_HAND, "--distributed-no-spawn"]
PORT = ["--distributed-port", "29522"]
RIGHT = "torchrun --nproc_per_node {} --no_python fairseq-train"
SRUN = "srun --ntasks 2 fairseq-train"


@pytest.mark.parametrize(
    "flags, env, fault, right",
    [
        ([WORLD, "2"], {}, "nothing started these workers", RIGHT.format(2)),
        ([WORLD, "3"], TORCHRUN, "launcher started 2 workers", RIGHT.format(3)),
        ([], {"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT", RIGHT.format(2)),
        ([], {**TORCHRUN, "RANK": "2"}, "ranks go from 0 to 1", RIGHT.format(2)),
        (BY_HAND, {}, "nothing would be trained", "--distributed-no-spawn"),
        (NO_SPAWN, {}, "all workers would be rank 0", "--distributed-rank RANK"),
        ([*NO_SPAWN, "--distributed-rank", "2"], {}, "ranks go from 0 to 1", "rank 2"),
        ([], "slurm", "srun started 2 task(s)", SRUN),
        ([WORLD, "4", *PORT], "slurm", "srun started 2 task(s)", "srun --ntasks 4"),
        ([WORLD, "2"], "slurm", "--distributed-port -1", SRUN),
        ([WORLD, "2", *PORT], {"SLURM_JOB_NODELIST": "n1"}, "srun started 1 task(s)", SRUN),
    ],
)
def test_invalid_launches_name_the_correct_command(
    flags: list[str],
    env: dict[str, str] | str,
    fault: str,
    right: str,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (slurm(work) if isinstance(env, str) else env).items():
        monkeypatch.setenv(name, value)
    argv = [str(work / "nowhere"), "--arch", "transformer", *fsq.TINY, *flags]
    with pytest.raises(ValueError) as error:  # not an error about the missing data
        fsq.main("train", argv)
    assert fault in str(error.value) and right in str(error.value), error.value


def test_one_process_stays_one_process(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun with one worker, and a batch script of Slurm without srun: nothing is changed."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for name, value in {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    cfg = parsed(work)
    workers.prepare(cfg)
    assert cfg.distributed_training == parsed(work).distributed_training


def test_number_of_workers_must_match_the_batch(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripts pass their number of workers in the environment."""
    argv = [str(work / "nowhere"), "--arch", "transformer", *fsq.TINY]
    monkeypatch.setenv("FAIRSEQ_DPQ_WORKERS", "4")
    with pytest.raises(ValueError, match="computed for 4 workers, but 1 would be started"):
        fsq.main("train", argv)
    monkeypatch.setenv("FAIRSEQ_DPQ_WORKERS", "1")
    with pytest.raises(Exception, match="nowhere"):  # gets as far as the missing data
        fsq.main("train", argv)


def parsed(work: Path, *flags: str) -> object:
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser()
    argv = [str(work / "bin"), "--arch", "transformer", *fsq.TINY, *flags]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))
