"""Ranks of jobs, forked from one process that has imported what a rank imports.

Importing torchtitan's trainer costs a rank several seconds of a core, more than a small job itself
trains. :class:`PreloadedJobs` starts one process that imports it all on the CPU, and runs
``train JOB`` in forks of it: what the launcher checks first, then the ranks, each with the
environment that a launcher gives it. The launcher itself, and the command line, are left out; tests
of those run the real command.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent.parent


class PreloadedJobs:
    """The process that has imported everything, and how to ask it for a job."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cpu.preloaded", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        self._messages = self._socket.makefile("r")

    def start(self, args: list[str], *, cwd: Path, env: dict[str, str], out: int, err: int) -> int:
        """Start ``train`` with ``args``; returns the id of its process, and process group."""
        request = json.dumps({"args": args, "cwd": str(cwd), "env": env}).encode() + b"\n"
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [out, err]))]
        self._socket.sendmsg([len(request).to_bytes(4, "big")], ancillary)
        self._socket.sendall(request)
        return int(self._messages.readline())

    def wait(self) -> int:
        """The exit status of what was started last, once all of its processes have ended."""
        return int(self._messages.readline())

    def close(self) -> None:
        self._messages.close()
        self._socket.close()
        self._process.wait(timeout=30)


def serve(connection: socket.socket) -> None:
    """Import everything, then run one job after another, each in a process group of its own."""
    _preload()
    while True:
        head, descriptors, *_ = socket.recv_fds(connection, 4, 2)
        if not head:
            return
        out, err = descriptors
        size = int.from_bytes(head, "big")
        request = json.loads(_receive(connection, size))
        # A fork takes only the thread that forks; another one's locks would stay locked.
        assert threading.active_count() == 1, threading.enumerate()
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become_launcher(out, err, **request)
        os.close(out)
        os.close(err)
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def _preload() -> None:
    from titan_lifecycle import cpu_backend

    # torchtitan picks its device when it is imported.
    cpu_backend.activate()
    import importlib

    for module in (
        "tensorboard",
        "torch.distributed.checkpoint",
        "torch.utils.tensorboard",
        "torchtitan.models.deepseek_v3.config_registry",
        "torchtitan.models.gpt_oss.config_registry",
        "torchtitan.models.llama3.config_registry",
        "torchtitan.models.qwen3.config_registry",
        "titan_lifecycle.run.worker",
        "titan_lifecycle.trainer",
    ):
        importlib.import_module(module)


def _become_launcher(out: int, err: int, *, args: list[str], cwd: str, env: dict) -> NoReturn:
    from titan_lifecycle.jobs.errors import JobError
    from titan_lifecycle.jobs.job import read_header
    from titan_lifecycle.jobs.shipped import resolve_job
    from titan_lifecycle.run.load import load

    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(out, 1)
    os.dup2(err, 2)
    job, *overrides = args
    try:
        path = str(resolve_job(job))
        header = read_header(path)
        loaded = load(header, overrides, world_size=header.nproc_per_node)
    except JobError as error:
        print(f"titan-lifecycle: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    logs = Path(loaded.config.dump_folder, "logs")
    ranks = {}
    for rank in range(loaded.world_size):
        pid = os.fork()
        if pid == 0:
            if rank != loaded.loss_rank:
                logs.mkdir(parents=True, exist_ok=True)
                file = os.open(logs / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 1)
                os.dup2(file, 2)
            _become_rank([path, *overrides], rank, loaded.world_size, port)
        ranks[pid] = rank
    os._exit(_wait_for(ranks))


def _become_rank(args: list[str], rank: int, world_size: int, port: int) -> NoReturn:
    from titan_lifecycle.run import worker

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    # It leaves as a rank of the command does, at the last of the interpreter's exit handlers.
    sys.exit(worker.main(args))


def _wait_for(ranks: dict[int, int]) -> int:
    """The status of the rank that failed first, or 0. The others are ended then."""
    failed = 0
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code if code > 0 else 1
            print(f"rank {rank} ended with {code}", file=sys.stderr, flush=True)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return failed


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
