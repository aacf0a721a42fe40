"""Serves job files to torchtitan's own entry point.

    torchrun -m torchtitan.train --module titan_lifecycle --config configs/x.toml

torchtitan looks ``--config`` up as an attribute of this module and calls the result, so a
module-level ``__getattr__`` takes the name for a path, or for the stem of a shipped job.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lifecycle import cpu_backend
from titan_lifecycle.jobs.job import read_header
from titan_lifecycle.jobs.shipped import resolve_job, shipped_jobs
from titan_lifecycle.run.load import load

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    # Import machinery and inspect probe for dunder names and rely on this error. For any other
    # name it would be wrong: torchtitan takes an AttributeError for "no such config function"
    # and the reason would be lost.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_load, resolve_job(name))


def __dir__() -> list[str]:
    return list(shipped_jobs())


def _load(path: Path) -> Trainer.Config:
    header = read_header(path)
    if cpu_backend.resolve_device(header.device) == "cpu":
        raise ValueError(
            f"{path}: torchtitan's own entry point cannot run on the CPU; "
            f"run: titan-lifecycle train {path}"
        )
    from titan_lifecycle import data  # it imports torchtitan, for which the device is settled

    data.register()
    world_size = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    return load(header, [], world_size=world_size).config
