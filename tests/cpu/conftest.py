"""Runs of real jobs in processes of their own: preloaded ones, or those of the real command."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts import regenerate_goldens as goldens
from tests.cpu.preloaded import PreloadedJobs

CONFIGS = Path(__file__).parent.parent.parent / "configs"
TITAN_LIFECYCLE = (sys.executable, "-m", "titan_lifecycle")
# Small shapes, and text that is the same on every machine.
SMALL = ("--training.seq_len", "64", "--dataloader.dataset", "lifecycle_fixed")
# torchtitan's own wrapper.
STOCK = ("--stock",)
# What each golden was compared by, for the end of the test run.
COMPARED = pytest.StashKey[list[str]]()


@dataclasses.dataclass
class Run:
    """A finished run: what it printed, and where it wrote."""

    status: int
    stdout: str
    stderr: str
    dump_folder: Path

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def scalars(self, tag: str) -> dict[int, float]:
        """Step to value, from the one TensorBoard run there is."""
        (directory,) = (self.dump_folder / "tb").iterdir()
        events = EventAccumulator(str(directory))
        events.Reload()
        return {event.step: event.value for event in events.Scalars(tag)}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher would set."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env | {"OMP_NUM_THREADS": "1"} | extra


def left_running(marker: object) -> list[str]:
    """Command lines of processes, other than this one, that mention ``marker``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if str(marker) in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found


@pytest.fixture
def run_job(tmp_path):
    """`runner` in the test's own directory."""
    return runner(tmp_path)


@functools.cache
def preloaded_jobs() -> PreloadedJobs:
    # Instruction sets are chosen when torch is imported: those that goldens are made with.
    jobs = PreloadedJobs(environment(**goldens.environment("cpu_gloo")))
    atexit.register(jobs.close)
    return jobs


def runner(directory: Path) -> Callable[..., Run]:
    """A function that runs ``train JOB`` in ``directory``, in a process group of its own.

    Its ranks are preloaded ones. With ``command`` the job runs by that command, as a user's would.
    With ``terminal`` the command's stderr is a terminal; ``stop_after`` sends SIGINT to all of its
    processes, as a terminal's Ctrl-C does, once that text is on stdout.
    """

    def run(
        job: str | Path,
        *overrides: str,
        command: tuple[str, ...] | None = None,
        terminal: bool = False,
        stop_after: str | None = None,
        timeout: float = 300,
        **env: str,
    ) -> Run:
        dump_folder = directory / "out"
        args = [str(job), *overrides, "--dump_folder", str(dump_folder)]
        stdout, stdout_of_job = os.pipe()
        stderr, stderr_of_job = pty.openpty() if terminal else os.pipe()
        if terminal:
            termios.tcsetwinsize(stderr_of_job, (24, 100))
        if command is None:
            assert not terminal and not stop_after, "only a command has a terminal"
            jobs = preloaded_jobs()
            pid = jobs.start(
                args, cwd=directory, env=environment(**env), out=stdout_of_job, err=stderr_of_job
            )
            wait = jobs.wait
        else:
            process = subprocess.Popen(
                [*command, "train", *args],
                stdout=stdout_of_job,
                stderr=stderr_of_job,
                env=environment(**env),
                cwd=directory,
                start_new_session=True,
            )
            pid, wait = process.pid, process.wait
        os.close(stdout_of_job)
        os.close(stderr_of_job)
        errors: list[bytes] = []
        reader = threading.Thread(target=_drain, args=(stderr, errors))
        reader.start()
        timer = threading.Timer(timeout, os.killpg, (pid, signal.SIGKILL))
        timer.start()
        status = None
        try:
            lines = []
            with open(stdout) as output:
                for line in output:
                    lines.append(line)
                    if stop_after and stop_after in line:
                        os.killpg(pid, signal.SIGINT)
                        stop_after = None
            status = wait()
            reader.join()
        finally:
            timer.cancel()
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                # Its status is still to come, and the next job must not read it as its own.
                wait()
        return Run(status, "".join(lines), b"".join(errors).decode(), dump_folder)

    return run


@pytest.fixture(scope="session")
def golden_run(tmp_path_factory) -> Callable[..., Run]:
    """Run a job as its golden was made, once for each set of overrides.

    Later calls get the same run: tests of goldens, collectives and losses share it.
    """
    done: dict[tuple[str, ...], Run] = {}

    def run(job: str, *overrides: str) -> Run:
        key = (job, *overrides)
        if key not in done:
            done[key] = runner(tmp_path_factory.mktemp("run"))(
                job,
                *goldens.settings(job, "cpu_gloo"),
                *overrides,
                **goldens.environment("cpu_gloo"),
            )
        assert done[key].status == 0, done[key].output
        return done[key]

    return run


def pytest_terminal_summary(terminalreporter, config):
    if compared := config.stash.get(COMPARED, None):
        terminalreporter.section("goldens")
        terminalreporter.write("".join(compared))


def _drain(descriptor: int, into: list[bytes]) -> None:
    try:
        while chunk := os.read(descriptor, 65536):
            into.append(chunk)
    except OSError:  # how a terminal says that its other end is closed
        pass
    finally:
        os.close(descriptor)
