"""Ranks that torchrun or ``srun`` has started, and the environment that torch wants of them."""

import os
import re

from titan_lifecycle.jobs.errors import JobError

__all__ = ["first_host", "launched_from_outside", "use_slurm_environment"]


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
