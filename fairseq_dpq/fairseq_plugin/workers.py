"""How a run on CPU gets its workers: from torchrun, from Slurm, or started by hand.

Invalid launches fail here and print the correct command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Callable

import torch

from fairseq_dpq.fairseq_plugin.patching import around, replace


def cpu_workers() -> bool:
    """fairseq can only start several workers on CUDA devices, all versions.

    Without it, on CPU: plain torchrun trains independent copies that overwrite each other's
    checkpoints and exits with 0 (newer forks), or asks for NCCL (0.12.2);
    `--distributed-world-size 2` under torchrun divides by zero; a tcp:// launch without
    `--distributed-no-spawn` starts no worker, trains nothing and exits with 0. With it, torchrun
    and srun work on CPU with gloo, and invalid launches fail before any data is read.
    """
    from fairseq.distributed import utils as distributed_utils

    def call_main(old: Callable, cfg: Any, main: Callable, **kwargs: Any) -> Any:
        prepare(cfg)
        if cfg.distributed_training.distributed_init_method is None:
            distributed_utils.infer_init_method(cfg.distributed_training)
        check_count(cfg)
        result = old(cfg, main, **kwargs)
        leave()
        return result

    return around(distributed_utils, "call_main", call_main)


def ddp_on_cpu() -> bool:
    """`--ddp-backend pytorch_ddp` (the default) passes device ids for a model on CPU, all versions.

    Without it every worker fails with `ValueError: DistributedDataParallel device_ids and
    output_device arguments only work with single-device/multiple-device GPU modules`.
    """
    from fairseq.models import distributed_fairseq_model

    def make(old: type) -> type:
        class DistributedDataParallel(old):  # type: ignore[misc, valid-type]
            def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
                if all(p.device.type == "cpu" for p in module.parameters()):
                    kwargs.update(device_ids=None, output_device=None)
                super().__init__(module, *args, **kwargs)

        return DistributedDataParallel

    return replace(distributed_fairseq_model, "DistributedDataParallel", make)


def prepare(cfg: Any) -> None:
    """Fill in `cfg.distributed_training` for a run on CPU, from torchrun's or Slurm's variables.

    Raises ValueError with the correct command if the launch is invalid. Runs on CUDA devices are
    left to fairseq, except with one GPU per node, where newer forks ignore torchrun's variables.
    """
    dt = cfg.distributed_training
    if cfg.common.tpu or dt.pipeline_model_parallel:
        return
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if torch.cuda.is_available() and not cfg.common.cpu:
        if dt.distributed_init_method is None and dt.distributed_world_size == 1 < started:
            dt.distributed_world_size = started
        return

    if started > 1 and (dt.distributed_init_method or "env://") == "env://":
        _from_torchrun(dt, started)
    elif dt.distributed_init_method is None:
        if torch.cuda.is_available() and not _given("distributed-world-size"):
            dt.distributed_world_size = 1  # fairseq's default is the number of CUDA devices
        if not _from_slurm(dt):
            if dt.distributed_world_size > 1:
                raise ValueError(
                    f"--distributed-world-size {dt.distributed_world_size}: nothing started these "
                    f"workers, and there are no CUDA devices to start them on, or --cpu leaves "
                    f"them alone. For workers on CPU run: {_torchrun(dt.distributed_world_size)}"
                )
            return
    else:
        _check_by_hand(dt)
    dt.distributed_no_spawn = True
    dt.device_id = 0
    if dt.distributed_backend == "nccl":  # the default
        dt.distributed_backend = "gloo"


def leave() -> None:
    """Leave the process group of a run on CPU that has ended.

    gloo's threads free tensors, for which they need Python: one that does so while the interpreter
    shuts down ends the process with "terminate called without an active exception".
    """
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_backend() == "gloo":
        group.destroy_process_group()


def check_count(cfg: Any) -> None:
    """Fail if fairseq is about to start a different number of workers than the scripts computed the
    batch for: in a Slurm job it counts tasks, nodes and GPUs itself and ignores the flag."""
    wanted = os.environ.get("FAIRSEQ_DPQ_WORKERS")
    world = cfg.distributed_training.distributed_world_size
    if wanted and int(wanted) != world:
        raise ValueError(
            f"the batch was computed for {wanted} workers, but {world} would be started (Slurm "
            f"with one task per node: one worker per GPU); add --distributed-world-size {world}, "
            f"or use torchrun --nproc_per_node {wanted}"
        )


def _command() -> str:
    name = os.path.basename(sys.argv[0])
    return name if name.startswith("fairseq") else "fairseq-train"


def _given(option: str) -> bool:
    """Whether an option is on the command line (hydra's too), even with its default value."""
    words = [word.split("=")[0].lstrip("+-").replace("_", "-") for word in sys.argv[1:]]
    return option in [word.rsplit(".")[-1] for word in words]


def _torchrun(world: int) -> str:
    return f"torchrun --nproc_per_node {world} --no_python {_command()} DATA --cpu ..."


def _from_torchrun(dt: Any, started: int) -> None:
    missing = [v for v in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(v)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {started} but {' and '.join(missing)} is not set, so this process does "
            f"not know its place. torchrun sets them all: {_torchrun(started)}"
        )
    if dt.distributed_world_size not in (1, started):
        raise ValueError(
            f"--distributed-world-size {dt.distributed_world_size}, but the launcher started "
            f"{started} workers (WORLD_SIZE); leave the flag out, or run: "
            f"{_torchrun(dt.distributed_world_size)}"
        )
    dt.distributed_init_method = "env://"
    dt.distributed_world_size = started
    dt.distributed_rank = int(os.environ["RANK"])
    _check_rank(dt, "RANK")


def _from_slurm(dt: Any) -> bool:
    """One worker per Slurm task; the same variables and flags as fairseq uses with GPUs."""
    env = os.environ
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    tasks = int(env.get("SLURM_STEP_NUM_TASKS") or 1)  # srun sets it, sbatch does not
    world, port = dt.distributed_world_size, dt.distributed_port
    if nodes is None or (tasks == 1 and world == 1):
        return False
    wanted = world if world > 1 else tasks
    right = (
        f"srun --ntasks {wanted} {_command()} DATA --cpu --distributed-world-size {wanted} "
        f"--distributed-port 29500 ..."
    )
    if tasks == 1:
        raise ValueError(
            f"--distributed-world-size {world} in a Slurm job, but not with {world} tasks of srun. "
            f"Run: {right}, or on one node: {_torchrun(world)}"
        )
    if world != tasks and not (world == 1 and port > 0):
        raise ValueError(
            f"srun started {tasks} tasks, but --distributed-world-size is {world}: these would be "
            f"copies that overwrite each other's checkpoints. Run: {right}"
        )
    if port <= 0:
        raise ValueError(
            f"--distributed-port is {port}: Slurm's tasks need a port to meet at. Run: {right}"
        )
    if "SLURM_PROCID" not in env:
        raise ValueError(f"SLURM_PROCID is not set, so this task has no rank. Run: {right}")
    try:
        hosts = subprocess.check_output(["scontrol", "show", "hostnames", nodes]).split()
    except FileNotFoundError as error:
        raise ValueError(
            f"Slurm's scontrol, which names the first host of {nodes}, is not on the PATH; "
            f"or run: {_torchrun(tasks)}"
        ) from error
    dt.distributed_init_method = f"tcp://{hosts[0].decode()}:{port}"
    dt.distributed_world_size = tasks
    dt.distributed_rank = int(env["SLURM_PROCID"])
    _check_rank(dt, "SLURM_PROCID")
    return True


def _check_by_hand(dt: Any) -> None:
    """`--distributed-init-method` was given: the user starts each worker with its rank."""
    world = dt.distributed_world_size
    right = (
        f"start one process per rank: {_command()} DATA --cpu --distributed-init-method "
        f"{dt.distributed_init_method} --distributed-world-size {max(world, 2)} "
        f"--distributed-rank RANK --distributed-no-spawn ...; or all at once: "
        f"{_torchrun(max(world, 2))}"
    )
    if not dt.distributed_no_spawn:
        raise ValueError(
            f"--distributed-init-method {dt.distributed_init_method} without "
            f"--distributed-no-spawn starts one worker per CUDA device, and there is none: nothing "
            f"would be trained. On CPU {right}"
        )
    if world > 1 and _given("distributed-init-method") and not _given("distributed-rank"):
        raise ValueError(
            f"--distributed-rank is missing: all {world} workers would be rank 0. On CPU {right}"
        )
    _check_rank(dt, "--distributed-rank")


def _check_rank(dt: Any, source: str) -> None:
    if not 0 <= dt.distributed_rank < dt.distributed_world_size:
        raise ValueError(
            f"{source} {dt.distributed_rank} with {dt.distributed_world_size} workers "
            f"(--distributed-world-size): ranks go from 0 to {dt.distributed_world_size - 1}"
        )
