"""A CPU rank's device: what torchtitan asks of it, and the settings a job on it starts from."""

import contextlib
import dataclasses
import importlib
import math
import platform
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from titan_lifecycle import private_names

__all__ = ["activate", "device_defaults", "resolve_device"]

_COMPILED_MASKS = (
    "torchtitan.models.common.attention",
    "torch.distributed.tensor.experimental._context_parallel._attention",
)


def resolve_device(device: str) -> str:
    """The device a job with ``device`` runs on: ``auto`` is the accelerator where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def device_defaults() -> dict[str, Any]:
    """What a CPU job starts from, below the job file and the command line."""
    return {
        # torchtitan captures the step into a CUDA graph unless it is told not to.
        "training.disable_cuda_graphs": True,
        # The result and the speed of bfloat16 depend on the CPU's instruction set.
        "training.mixed_precision_param": "float32",
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _CpuProperties:
    name: str
    total_memory: int


class _CpuDeviceModule(ModuleType):
    """``torch.cpu`` and what torchtitan asks of a device module beyond it.

    torchtitan's memory monitor needs a name, a capacity and peak figures; `memory_stats` gives
    them the process's resident set. ``torch.cpu`` itself stays as it is for everybody else.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        # torch.cpu says "cpu", but torchtitan passes this on as barrier(device_ids=[...]).
        return 0

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return platform.machine()

    @classmethod
    def get_device_properties(cls, device: object = None) -> _CpuProperties:
        return _CpuProperties(cls.get_device_name(), _proc_kib("/proc/meminfo", "MemTotal") * 1024)

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        peak = _proc_kib("/proc/self/status", "VmHWM") * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        # proc(5): 5 resets the peak resident set size to its current value. Some sandboxes forbid
        # it; the peak is then the one since the process started.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    @staticmethod
    def empty_cache() -> None:
        """There is no caching allocator to empty."""


def _proc_kib(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"{path} has no {key}; the CPU backend needs Linux's /proc")


def activate() -> None:
    """Make this process a CPU rank. Call it before anything imports torchtitan; idempotent.

    Raises:
        ImportError: torchtitan lacks what is replaced, or relied on.
        RuntimeError: torchtitan has taken another device already.
    """
    private_names.check("device of torchtitan")
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    if utils.device_type == "cpu" and isinstance(utils.device_module, _CpuDeviceModule):
        return
    # These copy the device at their own import, and would keep the old one.
    late = [
        name
        for name, module in sys.modules.items()
        if name.startswith("torchtitan.")
        and module is not utils
        and ("device_type" in vars(module) or "device_module" in vars(module))
    ]
    if late:
        raise RuntimeError(
            "the CPU backend must be activated before torchtitan is imported, but these modules "
            f"already hold a device: {', '.join(sorted(late))}"
        )
    # torchtitan would take the CPU's speed for an A100's, with two warnings. With no figure to
    # compare with, the model FLOPS utilization is 0.
    utils.get_peak_flops = lambda device_name: math.inf
    # torch says so of any CPU mesh, several times per rank; `parameters` deals with it.
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    utils.device_type = "cpu"
    utils.device_module = _CpuDeviceModule("torchtitan_cpu_device")

    private_names.check("CPU backend")
    # Both compile create_block_mask, which costs seconds per process and needs a C++ compiler;
    # a mask of these sizes is made faster without. There is no other seam: the decoder and
    # context parallelism call functions that call these globals.
    for name in _COMPILED_MASKS:
        module: Any = importlib.import_module(name)
        module._compiled_create_block_mask = module.create_block_mask
