"""``titan-lifecycle doctor``: what is installed here, and whether this package fits it.

Nothing here needs a GPU or the network, and nothing of this package is imported that may refuse to
load: where torch's private contract is broken, that is what the report is about.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from titan_lifecycle import __version__, cpu_backend, private_names

__all__ = ["examine"]

_REPRODUCTION_SECONDS = 120
_VERDICTS = {0: "the gap is closed", 1: "the gap is open"}
# The modules that read private names, and the parts of the list they check at import.
_READERS = {
    "fsdp_lifecycle.private": ("FSDP2",),
    "fsdp_lifecycle.invocations": ("autograd",),
    "pipeline": ("pipelining",),
    "losses.chunked": ("losses of torchtitan",),
    "jobs.job": ("jobs of torchtitan",),
    "cpu_backend.device": ("device of torchtitan", "CPU backend"),
}


@dataclass(frozen=True, slots=True)
class _Gap:
    """A gap in torch that this package works around until upstream closes it."""

    issue: int
    what: str
    workaround: str
    # The owner and the name of upstream's own API, where this package knows one to use.
    upstream: tuple[type, str] | None = None


_GAPS = (
    _Gap(
        203176,
        "inner backwards reach other groups; a repeated grouped forward is never completed",
        "fsdp_partial_backwards",
    ),
    _Gap(
        203177,
        "no policy can be saved and restored by value",
        "fsdp_lifecycle.GroupPolicy",
    ),
    _Gap(
        203178,
        "metadata inference leaves FSDP gradients in a pipeline's first step",
        "register_metadata_inference_cleanup",
        (PipelineStage, "register_metadata_inference_cleanup"),
    ),
)


def examine(*, reproduce: bool = True) -> int:
    """Print the report. Returns the exit status: 1 where the private contract does not hold.

    A gap that reproduces is what this package is for, and no failure.

    Args:
        reproduce: Whether to run the reproductions of the gaps, each on two CPU ranks.
    """
    _print_installed()
    fits = _print_contract()
    _print_gaps(reproduce)
    print()
    print(
        "titan_lifecycle fits this torch and torchtitan"
        if fits
        else "titan_lifecycle does not fit this torch or torchtitan: see MISSING above"
    )
    return int(not fits)


def _print_installed() -> None:
    device = cpu_backend.resolve_device("auto")
    _title("installed")
    _row("titan_lifecycle", __version__)
    _row("python", f"{platform.python_version()} ({platform.platform()})")
    _row("torch", str(torch.__version__))
    try:
        _row("torchtitan", version("torchtitan"))
    except PackageNotFoundError:
        _row("torchtitan", "not installed")
    _row("CUDA", torch.version.cuda or "not in this build")
    _row("ROCm", torch.version.hip or "not in this build")
    nccl = dist.is_nccl_available()
    _row("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not in this build")
    _row("Gloo", "in this build" if dist.is_gloo_available() else "not in this build")
    _row("CPU", f"{os.cpu_count()} cores, capability {torch.backends.cpu.get_cpu_capability()}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    _row("GPUs", ", ".join(gpus) or "none")
    _row("backend", f"{dist.get_default_backend_for_device(device)} on {device}")


def _print_contract() -> bool:
    """Whether everything that relies on private names finds them; prints each."""
    _title("private contract")
    reported: list[str] = []
    for name, parts in _READERS.items():
        try:
            import_module(f"titan_lifecycle.{name}")
            for part in parts:
                private_names.check(part)
        except Exception as error:  # whatever a torch of another version makes of an import
            reason = str(error) if isinstance(error, ImportError) else repr(error)
            if reason in reported:
                _row("not checked", f"{', '.join(parts)}: titan_lifecycle.{name} needs the above")
            else:
                reported.append(reason)
                _row("MISSING", f"{', '.join(parts)}: {reason}")
            continue
        _row("ok", f"{', '.join(parts)}: titan_lifecycle.{name} loads")
        for part in parts:
            for path, names in private_names.PRIVATE_NAMES[part].items():
                _row("ok", f"{private_names.owner_name(path)}: {', '.join(names)}")
    return not reported


def _print_gaps(reproduce: bool) -> None:
    _title("upstream gaps, without titan_lifecycle")
    for gap in _GAPS:
        state, observed = _reproduce(gap.issue) if reproduce else ("not run", [])
        _row(state, f"pytorch/pytorch#{gap.issue}: {gap.what}")
        for line in observed:
            _row("", f"- {line}")
        if gap.upstream is not None and hasattr(*gap.upstream):
            owner, name = gap.upstream
            _row("", f"upstream fix in this torch: {owner.__name__}.{name}, which is used")
        elif state == "closed":
            _row("", f"upstream fix in this torch: nothing is left for {gap.workaround} to do")
        elif state == "open":
            _row("", f"no upstream fix in this torch: {gap.workaround} works around it")


def _reproduce(issue: int) -> tuple[str, list[str]]:
    """``open``, ``closed`` or ``unknown``, and what was observed."""
    program = _programs() / f"pytorch_{issue}.py"
    process = subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=_REPRODUCTION_SECONDS)
    except subprocess.TimeoutExpired:
        return "unknown", [f"{program} did not end within {_REPRODUCTION_SECONDS} s"]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            process.communicate()
    # A program that fails also exits with status 1, but has no verdict.
    *observed, verdict = stdout.splitlines() or [""]
    if verdict != _VERDICTS.get(process.returncode):
        reason = stderr.splitlines()[-1:] or [f"exit status {process.returncode}"]
        return "unknown", [f"{program} failed: {reason[0]}"]
    return verdict.rsplit(maxsplit=1)[-1], observed


def _programs() -> Path:
    # In a wheel they lie inside the package, in a checkout in scripts/.
    package = Path(__file__).parent
    inside = package / "repro"
    return inside if inside.is_dir() else package.parent / "scripts" / "repro"


def _title(text: str) -> None:
    print(f"\n{text}", flush=True)


def _row(label: str, text: str) -> None:
    print(
        textwrap.fill(
            text,
            width=100,
            initial_indent=f"  {label:<17}",
            subsequent_indent=" " * 19,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        flush=True,
    )
