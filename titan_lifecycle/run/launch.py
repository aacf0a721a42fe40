"""Start the ranks of a job on this machine, and say what went wrong when one fails."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_lifecycle.jobs.job import Job, read_header
from titan_lifecycle.run import worker
from titan_lifecycle.run.assets import check_tokenizer
from titan_lifecycle.run.load import load
from titan_lifecycle.run.slurm import launched_from_outside

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def train(path: str, overrides: list[str]) -> int:
    """Run the job in ``path``. Returns the exit status.

    Under torchrun or srun this process is a rank and becomes the worker. Otherwise the job is
    checked first, so that a mistake is reported once, and then its ranks are started.
    """
    if launched_from_outside():
        return worker.main([path, *overrides])
    header = read_header(path)
    job = load(header, overrides, world_size=header.nproc_per_node)
    check_tokenizer(job)
    if job.device == "cpu":
        # Each rank would use every core for itself.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return start_ranks(job, overrides)


def start_ranks(job: Job, overrides: list[str]) -> int:
    """Start ``nproc_per_node`` workers under torch's elastic agent and wait for them.

    The rank with the loss has the console; the others write to ``<dump_folder>/logs``.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    num_ranks = job.world_size
    logs = DefaultLogsSpecs(
        log_dir=os.path.join(job.config.dump_folder, "logs"),
        redirects={rank: Std.ALL for rank in range(num_ranks) if rank != job.loss_rank},
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=time.strftime("%Y%m%d-%H%M%S"),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=logs,
    )
    os.environ[worker.LAUNCHED] = "1"
    # The agent logs the failure of a rank several times over; `_report` says it once.
    logging.disable(logging.ERROR)
    try:
        elastic_launch(config, sys.executable)(
            "-m", "titan_lifecycle.run.worker", str(job.header.path), *overrides
        )
    except ChildFailedError as error:
        print(_report(error), file=sys.stderr)
        return 1
    except SignalException as stopped:
        print(f"titan-lifecycle: stopped by {stopped.sigval.name}", file=sys.stderr)
        return 128 + stopped.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _report(error: "ChildFailedError") -> str:
    """The failure that came first, in a line or two, and where to read more."""
    rank, failure = _first_failure(error.failures)
    recorded = _recorded(failure)
    if recorded is None:
        reason = f"ended with exit status {failure.exitcode}"
        if failure.exitcode < 0:
            reason = f"was killed by {failure.signal_name()}"
        return f"titan-lifecycle: rank {rank} {reason}"
    traceback = Path(failure.error_file).with_name("traceback.txt")
    traceback.write_text(recorded["extraInfo"]["py_callstack"])
    return (
        f"titan-lifecycle: rank {rank} failed: {recorded['message']}\n"
        f"  its traceback: {os.path.relpath(traceback)}"
    )


def _first_failure(failures: "dict[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """The failure the others follow from.

    An exception with a reason of its own is one; a rank killed by a signal has left no record,
    but those that lost it have. The agent, too, ends ranks by SIGTERM, after it has seen a
    failure, so those come later in ``failures``.
    """
    records = {rank: record for rank, f in failures.items() if (record := _recorded(f))}
    own = [rank for rank, record in records.items() if not record["extraInfo"]["lost_peer"]]
    killed = [rank for rank, failure in failures.items() if failure.exitcode < 0]

    def recorded_at(rank: int) -> int:
        return int(records[rank]["extraInfo"]["time_ns"])

    if own:
        rank = min(own, key=recorded_at)
    elif killed:
        rank = killed[0]
    elif records:
        rank = min(records, key=recorded_at)
    else:
        rank = next(iter(failures))
    return rank, failures[rank]


def _recorded(failure: "ProcessFailure") -> dict[str, Any] | None:
    """What the worker wrote about its exception, if it did (see `worker._record_failure`)."""
    message = failure.error_file_data["message"]
    if isinstance(message, dict) and "time_ns" in message["extraInfo"]:
        return message
    return None
