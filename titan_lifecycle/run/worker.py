"""One rank of a job: ``python -m titan_lifecycle.run.worker JOB.toml [--section.key value]``.

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
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lifecycle import cpu_backend
from titan_lifecycle.jobs.errors import JobError
from titan_lifecycle.jobs.job import Job, read_header
from titan_lifecycle.run.assets import check_tokenizer
from titan_lifecycle.run.load import load
from titan_lifecycle.run.lock import hold_dump_folder
from titan_lifecycle.run.slurm import use_slurm_environment

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

# Set by titan_lifecycle.run.launch for the processes it starts.
LAUNCHED = "TITAN_LIFECYCLE_LAUNCHED"


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


def _run(path: str, overrides: list[str]) -> None:
    header = read_header(path)
    if cpu_backend.resolve_device(header.device) == "cpu":
        cpu_backend.activate()
    job = load(header, overrides, world_size=int(os.environ["WORLD_SIZE"]))
    check_tokenizer(job)
    if job.device == "cpu":
        cpu_backend.adapt(job.config)
    train(job)


def train(job: Job) -> None:
    """Build the trainer and run it, as ``torchtitan.train.main`` does with a parsed config."""
    # The launcher holds the folder for the ranks it starts.
    is_holder = LAUNCHED not in os.environ and os.environ["RANK"] == "0"
    with hold_dump_folder(job.config.dump_folder) if is_holder else nullcontext():
        _train(job)


def _train(job: Job) -> None:
    # Here: torchtitan picks its device when it is imported.
    import torch.distributed as dist
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger, logger

    from titan_lifecycle import data

    config = job.config
    init_logger()
    if int(os.environ["RANK"]) != job.loss_rank:
        # With a pipeline the other ranks would print step lines with a loss of -1.
        logger.setLevel("WARNING")
    # torchtitan warns if this variable misses the rank it expects the loss on.
    pp_degree = config.parallelism.pipeline_parallel_degree
    last_stage = job.world_size // pp_degree * (pp_degree - 1)
    os.environ["LOG_RANK"] = f"{job.loss_rank},{last_stage}"
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
    except (Exception, SystemExit) as error:
        # Before closing, which takes time: the launcher looks for the rank that failed first.
        _record_failure(error)
        if trainer is not None:
            trainer.close()
        raise
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _lost_peer(error: BaseException) -> bool:
    """Whether ``error`` only says that another rank is gone."""
    import torch.distributed as dist

    return isinstance(error, dist.DistNetworkError) or bool(
        re.search(r"[Cc]onnection (closed|reset) by (remote )?peer|gloo/transport", str(error))
    )


def _record_failure(error: BaseException) -> bool:
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
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):  # a full disk: the traceback on the console must do
        return False
    lost_peer = _lost_peer(error)
    # torchrun shows the failure with the earliest second: never let it be a consequence.
    timestamp = str(now // 10**9 + lost_peer)
    record["message"]["extraInfo"].update(timestamp=timestamp, time_ns=now, lost_peer=lost_peer)
    try:
        file.write_text(json.dumps(record))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
