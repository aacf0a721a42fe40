"""A job that is asked to stop: by the launcher's file, or by SIGTERM to a rank.

[Note: Stopping at SIGTERM] With ``lifecycle.checkpoint_on_sigterm`` the first SIGTERM asks for an
end after the current step, with a checkpoint; the second one ends the job at once. The launcher
passes the request on as a file and not as a signal, so that SIGTERM keeps its meaning for the ranks
that it starts: the elastic agent ends the others that way when a rank has failed, and they must not
wait for a step that cannot end any more. Ranks of torchrun and srun get no such file and take the
signal itself; torchrun kills after 30 s what has not ended by then.

Ranks see a request at different times. They agree on a step with an all-reduce of a flag among the
hosts, at the end of each step (``LifecycleTrainer``).
"""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["STOP_FILE", "is_requested", "listen"]

STOP_FILE = "TITAN_LIFECYCLE_STOP_FILE"
"""The environment variable in which the launcher names the file that is there once it is asked."""

_signalled = False


def listen() -> None:
    """Take the first SIGTERM to this process for a request, unless the launcher takes it."""
    if STOP_FILE not in os.environ:
        signal.signal(signal.SIGTERM, _note)


def is_requested() -> bool:
    return _signalled or os.path.exists(os.environ.get(STOP_FILE, ""))


def _note(signum: int, frame: FrameType | None) -> None:
    global _signalled
    _signalled = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
