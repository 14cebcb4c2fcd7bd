"""How a run on CPU gets its workers: from torchrun, from Slurm, or started by hand.

Invalid launches fail here and print the correct command.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any, Callable

import torch

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.patching import around, replace

# The right command of each launcher, for N workers.
_TORCHRUN = "torchrun --nproc_per_node {n} --no_python {command} DATA --cpu ..."
_SRUN = (
    "srun --ntasks {n} {command} DATA --cpu --distributed-world-size {n} --distributed-port 29500 "
    "..."
)
_BY_HAND = (
    "{command} DATA --cpu --distributed-init-method tcp://HOST:PORT --distributed-world-size {n} "
    "--distributed-rank RANK --distributed-no-spawn ..., once for each rank; or all at once: "
    + _TORCHRUN
)


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
        distributed_utils.infer_init_method(cfg.distributed_training)
        _check_count(cfg.distributed_training.distributed_world_size)
        result = old(cfg, main, **kwargs)
        # gloo's threads free tensors, for which they need Python: one that does so while the
        # interpreter shuts down ends the process with "terminate called without an active
        # exception". Those of a group end when nothing holds it. fairseq keeps one on a function;
        # so does DDP in the trainer, which must not be the last: it waits for the threads without
        # letting them have Python, for ever.
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_backend() == "gloo":
            gc.collect()  # the trainer, which is a cycle
            group.destroy_process_group()
            vars(distributed_utils.get_global_group).clear()
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
    by_flag = dt.distributed_init_method is not None
    if torch.cuda.is_available() and not by_flag and not _given("distributed-world-size"):
        dt.distributed_world_size = 1  # fairseq's default is the number of CUDA devices
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)  # srun sets it, sbatch does not
    world = dt.distributed_world_size
    wanted = world if world > 1 else max(started, tasks, 2)
    if started > 1 and (dt.distributed_init_method or "env://") == "env://":
        right, problem = _TORCHRUN, _from_torchrun(dt, started)
    elif by_flag:
        right, problem = _BY_HAND, _by_hand(dt)
    elif nodes and max(tasks, world) > 1:
        right, problem = _SRUN, _from_slurm(dt, nodes, tasks)
    elif world > 1:
        nothing = "nothing started these workers, and there are no CUDA devices for them, or --cpu"
        right, problem = _TORCHRUN, f"--distributed-world-size {world}: {nothing}"
    else:
        return
    rank, world = dt.distributed_rank, dt.distributed_world_size
    if not problem and not 0 <= rank < world:
        problem = f"this worker is rank {rank} of {world}, but ranks go from 0 to {world - 1}"
    if problem:
        name = os.path.basename(sys.argv[0])
        command = name if name.startswith("fairseq") else "fairseq-train"
        raise DPQConfigError(f"{problem}. Run: {right.format(n=wanted, command=command)}")
    dt.distributed_no_spawn = True
    dt.device_id = 0
    if dt.distributed_backend == "nccl":  # the default
        dt.distributed_backend = "gloo"


def _given(option: str) -> bool:
    """Whether an option is on the command line (hydra's too), even with its default value."""
    words = [word.split("=")[0].lstrip("+-").replace("_", "-") for word in sys.argv[1:]]
    return option in [word.rsplit(".")[-1] for word in words]


# Each of these fills in where the workers meet, and returns what is wrong, if anything is.


def _from_torchrun(dt: Any, started: int) -> str:
    missing = [v for v in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(v)]
    if missing:
        return f"WORLD_SIZE is {started}, but torchrun's {' and '.join(missing)} is not set"
    if dt.distributed_world_size not in (1, started):
        return (
            f"--distributed-world-size {dt.distributed_world_size}, but the launcher started "
            f"{started} workers (WORLD_SIZE); leave the flag out, or start as many"
        )
    _meet(dt, "env://", started, os.environ["RANK"])
    return ""


def _from_slurm(dt: Any, nodes: str, tasks: int) -> str:
    """One worker per Slurm task; the same variables and flags as fairseq uses with GPUs."""
    world, port = dt.distributed_world_size, dt.distributed_port
    if tasks == 1 or world not in (1, tasks) or port <= 0:
        return (
            f"srun started {tasks} task(s), with --distributed-world-size {world} and "
            f"--distributed-port {port}: each task is one worker, and they need a port to meet at"
        )
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        host = subprocess.check_output(command, text=True).split()[0]
        _meet(dt, f"tcp://{host}:{port}", tasks, os.environ["SLURM_PROCID"])
    except (OSError, subprocess.CalledProcessError, LookupError) as error:
        return f"`{' '.join(command)}` and SLURM_PROCID must say where to meet: {error!r}"
    return ""


def _by_hand(dt: Any) -> str:
    """`--distributed-init-method` was given: the user starts each worker with its rank."""
    method = f"--distributed-init-method {dt.distributed_init_method}"
    if not dt.distributed_no_spawn:
        return f"{method} without --distributed-no-spawn: on CPU nothing would be trained"
    one = dt.distributed_world_size == 1
    if not one and _given("distributed-init-method") and not _given("distributed-rank"):
        return f"{method} without --distributed-rank: all workers would be rank 0"
    return ""


def _meet(dt: Any, where: str, world: int, rank: str) -> None:
    dt.distributed_init_method = where
    dt.distributed_world_size, dt.distributed_rank = world, int(rank)


def _check_count(world: int) -> None:
    """Fail if fairseq is about to start a different number of workers than the scripts computed the
    batch for: in a Slurm job it counts tasks, nodes and GPUs itself and ignores the flag."""
    wanted = os.environ.get("FAIRSEQ_DPQ_WORKERS")
    if wanted and int(wanted) != world:
        raise DPQConfigError(
            f"the batch was computed for {wanted} workers, but {world} would be started (Slurm "
            f"with one task per node: one worker per GPU); add --distributed-world-size {world}, "
            f"or use torchrun --nproc_per_node {wanted}"
        )
