"""Runs of real jobs, through the command, in processes of their own."""

from __future__ import annotations

import dataclasses
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

CONFIGS = Path(__file__).parent.parent.parent / "configs"
TITAN_LIFECYCLE = (sys.executable, "-m", "titan_lifecycle")
# Small shapes, and text that is the same on every machine.
SMALL = ("--training.seq_len", "64", "--dataloader.dataset", "lifecycle_fixed")
# torchtitan's own wrapper.
STOCK = (
    "--lifecycle.no-enabled",
    *("--lifecycle.gradient-reduction", "every_microbatch"),
)
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


def torchrun(*args: str) -> tuple[str, ...]:
    """The command under torchrun, for processes of one agent."""
    return (sys.executable, "-m", "torch.distributed.run", *args, "-m", "titan_lifecycle")


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


def runner(directory: Path) -> Callable[..., Run]:
    """A function that runs ``train JOB`` in ``directory``, in a process group of its own.

    With ``terminal`` its stderr is a terminal; ``stop_after`` sends SIGINT to all of its
    processes, as a terminal's Ctrl-C does, once that text is on stdout.
    """

    def run(
        job: str | Path,
        *overrides: str,
        command: tuple[str, ...] = TITAN_LIFECYCLE,
        terminal: bool = False,
        stop_after: str | None = None,
        timeout: float = 300,
        **env: str,
    ) -> Run:
        dump_folder = directory / "out"
        args = [*command, "train", str(job), *overrides, "--dump_folder", str(dump_folder)]
        receiver, sender = pty.openpty() if terminal else os.pipe()
        if terminal:
            termios.tcsetwinsize(sender, (24, 100))
        process = subprocess.Popen(
            args,
            stdout=subprocess.PIPE,
            stderr=sender,
            text=True,
            env=environment(**env),
            cwd=directory,
            start_new_session=True,
        )
        os.close(sender)
        stderr: list[bytes] = []
        reader = threading.Thread(target=_drain, args=(receiver, stderr))
        reader.start()
        timer = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            lines = []
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if stop_after and stop_after in line:
                    os.killpg(process.pid, signal.SIGINT)
                    stop_after = None
            status = process.wait()
            reader.join()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return Run(status, "".join(lines), b"".join(stderr).decode(), dump_folder)

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
