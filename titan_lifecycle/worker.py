"""One rank of a training job: ``python -m titan_lifecycle.worker JOB.toml [--section.key value]``.

The same code runs under the package's own launcher, under torchrun and as a task of ``srun``. It
needs the environment a launcher gives to each process (``RANK``, ``WORLD_SIZE``, ...).
"""

import atexit
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lifecycle import cpu_backend
from titan_lifecycle.errors import JobError
from titan_lifecycle.job import Job, JobHeader, check_world_size, load_job, read_header

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

# Set by titan_lifecycle.launch for the processes it starts.
LAUNCHED = "TITAN_LIFECYCLE_LAUNCHED"


def launched_from_outside() -> bool:
    """Whether torchrun or srun has started this process as one of several ranks."""
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or _is_slurm_task()


def _is_slurm_task() -> bool:
    # A batch script and a shell from ``srun --pty`` have some of these variables, too, but they
    # are one process, which starts its ranks itself.
    env = os.environ
    return "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and int(env["SLURM_NTASKS"]) > 1


def use_slurm_environment() -> None:
    """Name the rank as torch does, from what ``srun`` says about its task."""
    env = os.environ
    if "RANK" in env or not _is_slurm_task():
        return
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env.setdefault("MASTER_ADDR", first_host(env["SLURM_JOB_NODELIST"]))
    # Two jobs on one node must not meet on one port.
    env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 20000))


def first_host(nodelist: str) -> str:
    """The first host of SLURM's notation, such as ``gpu[03-05,9],login1``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise JobError(f"cannot read a host from SLURM_JOB_NODELIST = {nodelist!r}")
    return "".join(part for part in match.groups() if part)


def main(argv: list[str]) -> int:
    """Train as one rank. Returns the exit status: 0, 1 for a failure, 2 for a wrong job.

    The process is this rank's alone: it ends by :func:`_leave`.
    """
    status = [1]
    atexit.register(_leave, status)
    try:
        status[0] = _main(argv)
    except SystemExit as error:
        status[0] = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    return status[0]


def _leave(status: list[int]) -> None:
    """End the process at the last of its exit handlers, without finalizing the interpreter.

    The process groups' threads outlive ``destroy_process_group`` (18 of gloo's in a small pipeline
    job). One that still has a tensor to free takes the GIL for it, which an interpreter being
    finalized answers by ending the thread; through C++ that is an abort, once training is over.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
        child.join()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status[0])


def _main(argv: list[str]) -> int:
    if LAUNCHED in os.environ:
        # The launcher reports an interrupt, once; the ranks end without a traceback each.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    use_slurm_environment()
    try:
        _run(argv[0], argv[1:])
    except JobError as error:
        _record_failure(error)
        # All ranks read the same file.
        if os.environ.get("RANK", "0") == "0":
            print(f"titan-lifecycle: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if _record_failure(error):
            return 1
        if _lost_peer(error):
            # Another rank has the reason, and nobody collects: say so in one line.
            print(f"rank {os.environ['RANK']} lost another rank: {error}", file=sys.stderr)
            return 1
        raise
    return 0


def load(header: JobHeader, overrides: list[str]) -> Job:
    """The job as it is trained here, with what its device and this package add to it."""
    on_cpu = cpu_backend.resolve_device(header.device) == "cpu"
    # torchtitan's configs log warnings, and the trainer repeats them once its logger is set up.
    logging.getLogger().addHandler(logging.NullHandler())

    return load_job(
        header,
        overrides,
        device_defaults=cpu_backend.device_defaults() if on_cpu else None,
        transform=plugin_config,
    )


def plugin_config(config: "Trainer.Config") -> "Trainer.Config":
    """The registry's config with what this package adds: ``[lifecycle]``, and a summary.

    Other trainers than torchtitan's own (Flux, GraphTrainer, ...) are left as they are: they have
    no ``[lifecycle]`` section.
    """
    # Here, after the device is settled: torchtitan picks its device when it is imported.
    from torchtitan.trainer import Trainer

    from titan_lifecycle import metrics
    from titan_lifecycle.trainer import lifecycle_config

    if type(config) is Trainer.Config:
        config = lifecycle_config(config)
    return metrics.use_summary(config)


def _run(path: str, overrides: list[str]) -> None:
    header = read_header(path)
    on_cpu = cpu_backend.resolve_device(header.device) == "cpu"
    if on_cpu:
        cpu_backend.activate()
    job = load(header, overrides)
    check_world_size(job, int(os.environ["WORLD_SIZE"]))
    train(cpu_backend.adapt(job.config) if on_cpu else job.config)


def train(config: "Trainer.Config") -> None:
    """Build the trainer and run it, as ``torchtitan.train.main`` does with a parsed config."""
    # Here: torchtitan picks its device when it is imported.
    import torch.distributed as dist
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger, logger

    from titan_lifecycle import data, metrics

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loss_rank = metrics.job_loss_rank(config, world_size)
    init_logger()
    if rank != loss_rank:
        # With a pipeline the other ranks would print step lines with a loss of -1.
        logger.setLevel("WARNING")
    # torchtitan warns if this variable misses the rank it expects the loss on.
    pp_degree = config.parallelism.pipeline_parallel_degree
    last_stage = world_size // pp_degree * (pp_degree - 1)
    os.environ["LOG_RANK"] = f"{loss_rank},{last_stage}"
    data.register()
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    trainer: Trainer | None = None
    try:
        trainer = config.build()
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    except Exception as error:
        # Before closing, which takes time: the launcher looks for the rank that failed first.
        _record_failure(error)
        if trainer is not None:
            trainer.close()
        raise
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _lost_peer(error: Exception) -> bool:
    """Whether ``error`` only says that another rank is gone."""
    import torch.distributed as dist

    return isinstance(error, dist.DistNetworkError) or bool(
        re.search(r"[Cc]onnection (closed|reset) by (remote )?peer|gloo/transport", str(error))
    )


def _record_failure(error: Exception) -> bool:
    """Write ``error`` to the file an elastic agent reads; false if there is none.

    Call it while the error is handled. The time is kept in nanoseconds: torch records seconds,
    too coarse to tell the first failure from those that follow from it.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    file = Path(path)
    if file.exists() and "time_ns" in file.read_text():
        return True
    now = time.time_ns()
    get_error_handler().record_exception(error)
    record = json.loads(file.read_text())
    lost_peer = _lost_peer(error)
    # torchrun shows the failure with the earliest second: never let it be a consequence.
    timestamp = str(now // 10**9 + lost_peer)
    record["message"]["extraInfo"].update(timestamp=timestamp, time_ns=now, lost_peer=lost_peer)
    file.write_text(json.dumps(record))
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
