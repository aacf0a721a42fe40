"""Start the ranks of a job on this machine, and say what went wrong when one fails."""

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from titan_lifecycle.jobs.job import Job, read_header
from titan_lifecycle.run import stop, worker
from titan_lifecycle.run.assets import check_tokenizer
from titan_lifecycle.run.load import load
from titan_lifecycle.run.lock import hold_dump_folder
from titan_lifecycle.run.slurm import launched_from_outside

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig


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
    with hold_dump_folder(job.config.dump_folder):
        return start_ranks(job, overrides)


def start_ranks(job: Job, overrides: list[str]) -> int:
    """Start ``nproc_per_node`` workers under torch's elastic agent and wait for them.

    The rank with the loss has the console; the others write to ``<dump_folder>/logs``.

    Signals to this process. SIGINT, as of Ctrl-C, ends the ranks at once, and the status is 130.
    SIGTERM does the same, with status 143; with ``lifecycle.checkpoint_on_sigterm`` the first one
    lets the ranks end their step and save a checkpoint, and the second one ends them at once. The
    status is 143 in both cases, unless a rank fails meanwhile.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    lifecycle = getattr(job.config, "lifecycle", None)
    os.environ[worker.LAUNCHED] = "1"
    # The agent logs the failure of a rank several times over; `_report` says it once.
    logging.disable(logging.ERROR)
    try:
        with _StopRequest(bool(lifecycle and lifecycle.checkpoint_on_sigterm)) as request:
            # Without the folder of the command: a user's profile.py there is not Python's.
            elastic_launch(_launch_config(job, request.signals), sys.executable)(
                *("-P", "-m", "titan_lifecycle.run.worker"), str(job.header.path), *overrides
            )
    except ChildFailedError as error:
        print(_report(error), file=sys.stderr)
        return 1
    except SignalException as stopped:
        print(f"titan-lifecycle: stopped by {stopped.sigval.name}", file=sys.stderr)
        return 128 + stopped.sigval
    finally:
        logging.disable(logging.NOTSET)
    if request.is_made:
        print("titan-lifecycle: stopped by SIGTERM, with a checkpoint", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


class _StopRequest:
    """While entered, the first SIGTERM asks the ranks to stop with a checkpoint, if ``wanted``.

    See [Note: Stopping at SIGTERM] in ``titan_lifecycle.run.stop``.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self.signals = "SIGINT,SIGHUP,SIGQUIT" if wanted else "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        self.is_made = False

    def __enter__(self) -> Self:
        if self._wanted:
            self._folder = tempfile.TemporaryDirectory()
            os.environ[stop.STOP_FILE] = os.path.join(self._folder.name, "stop")
            self._before = signal.signal(signal.SIGTERM, self._make)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._wanted:
            signal.signal(signal.SIGTERM, self._before)
            del os.environ[stop.STOP_FILE]
            self._folder.cleanup()

    def _make(self, signum: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        if self.is_made:
            raise SignalException("a second SIGTERM", signal.SIGTERM)
        self.is_made = True
        Path(os.environ[stop.STOP_FILE]).touch()
        # Not print: a signal may come in the middle of another one.
        os.write(
            2,
            b"titan-lifecycle: SIGTERM: the ranks end their step and save a checkpoint; a second "
            b"SIGTERM ends them at once\n",
        )


def _launch_config(job: Job, signals: str) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    num_ranks = job.world_size
    logs = DefaultLogsSpecs(
        log_dir=os.path.join(job.config.dump_folder, "logs"),
        redirects={rank: Std.ALL for rank in range(num_ranks) if rank != job.loss_rank},
    )
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=time.strftime("%Y%m%d-%H%M%S"),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=logs,
        signals_to_handle=signals,
    )


def _report(error: "ChildFailedError") -> str:
    """The failure that came first, in a line or two, and where to read more."""
    rank, failure = _first_failure(error.failures)
    recorded = _recorded(failure)
    if recorded is None:
        reason = f"ended with exit status {failure.exitcode}"
        if failure.exitcode < 0:
            reason = f"was killed by {failure.signal_name()}"
        return f"titan-lifecycle: rank {rank} {reason}"
    message = f"titan-lifecycle: rank {rank} failed: {recorded['message']}\n"
    traceback = Path(failure.error_file).with_name("traceback.txt")
    try:
        traceback.write_text(recorded["extraInfo"]["py_callstack"])
    except OSError:  # a full disk, perhaps the very cause
        return f"{message}{recorded['extraInfo']['py_callstack']}"
    return f"{message}  its traceback: {os.path.relpath(traceback)}"


def _first_failure(failures: "dict[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """The failure the others follow from.

    An exception with a reason of its own is one. A rank that was killed or has left by
    ``os._exit`` has no record, but those that lost it have. The agent, too, ends ranks by SIGTERM,
    after it has seen a failure: such a rank is named only if no other reason is left.
    """
    records = {rank: record for rank, f in failures.items() if (record := _recorded(f))}
    own = [rank for rank, record in records.items() if not record["extraInfo"]["lost_peer"]]
    silent = [rank for rank in failures if rank not in records]
    silent.sort(key=lambda rank: failures[rank].exitcode == -signal.SIGTERM)

    def recorded_at(rank: int) -> int:
        return int(records[rank]["extraInfo"]["time_ns"])

    if own:
        rank = min(own, key=recorded_at)
    elif silent:
        rank = silent[0]
    else:
        rank = min(records, key=recorded_at)
    return rank, failures[rank]


def _recorded(failure: "ProcessFailure") -> dict[str, Any] | None:
    """What the worker wrote about its exception, if it did (see `worker._record_failure`)."""
    message = failure.error_file_data["message"]
    if isinstance(message, dict) and "time_ns" in message["extraInfo"]:
        return message
    return None
