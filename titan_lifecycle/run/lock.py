"""One job at a time in a ``dump_folder``: two would overwrite each other's logs and checkpoints."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_lifecycle.jobs.errors import JobError

__all__ = ["LOCK_FILE", "hold_dump_folder"]

LOCK_FILE = "titan_lifecycle.lock"


@contextmanager
def hold_dump_folder(dump_folder: str) -> Iterator[None]:
    """Hold ``dump_folder`` for a job, and make it if it is not there.

    The file stays behind; what counts is the lock on it, which ends with the process. Where a file
    system has no locks, nothing is refused.

    Raises:
        JobError: Another job holds the folder, or it cannot be written.
    """
    try:
        Path(dump_folder).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(Path(dump_folder, LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unwritable(dump_folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace").strip() or "another job"
            raise JobError(
                f"dump_folder = '{dump_folder}' is in use by {owner}, and two jobs would overwrite "
                "each other's files; wait for it, or set another --dump_folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            raise _unwritable(dump_folder, error) from error
        yield
    finally:
        os.close(descriptor)


def _unwritable(dump_folder: str, error: OSError) -> JobError:
    where = f" ({error.filename})" if error.filename else ""
    return JobError(
        f"dump_folder = '{dump_folder}' cannot be written: {error.strerror}{where}; set "
        "--dump_folder to a folder that can"
    )
