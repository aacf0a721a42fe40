"""Run torchtitan's own trainer on CPU ranks over Gloo.

torchtitan 0.3 trains on accelerators. This module holds every adaptation that a CPU rank needs,
each at the seam torchtitan offers for it, with the reason beside it. Nothing happens on import:

1. `activate` runs in the worker, before torchtitan is imported, and gives torchtitan its device.
2. `device_defaults` are the settings a job on the CPU starts from; the job file overrides them.
3. `adapt` takes the loaded config and puts the component replacements into it.

Each replaced name is checked first; a torchtitan without it is refused with the name, instead of
failing somewhere in the middle of a step.
"""

import contextlib
import dataclasses
import functools
import importlib
import math
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["activate", "adapt", "device_defaults", "resolve_device"]

# Named by import path, as in a job's override.imports: importing them imports torchtitan.
_OVERRIDES = tuple(
    f"titan_lifecycle.cpu_backend.overrides.{name}"
    for name in ("dense_flex_attention", "gloo_token_dispatcher", "same_dtype_gpt_oss_experts")
)
_COMPILED_MASKS = (
    "torchtitan.models.common.attention",
    "torch.distributed.tensor.experimental._context_parallel._attention",
)
# What the replacements in overrides.py and below fit into.
_RELIED_ON = {
    "torchtitan.protocols.module": ("Module._param_init", "Module._init_param"),
    "torchtitan.models.common.attention": ("FlexAttention.forward",),
    "torchtitan.models.common.token_dispatcher": (
        "AllToAllTokenDispatcher._dispatch_token_exchange",
        "AllToAllTokenDispatcher._combine_token_exchange",
    ),
    "torchtitan.models.gpt_oss.moe": ("GptOssGroupedExperts.forward",),
}


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


def _require(module: ModuleType, *names: str) -> None:
    """Check that what is about to be replaced or relied on exists: ``A.b`` or ``a``."""
    for name in names:
        value: object = module
        for part in name.split("."):
            if not hasattr(value, part):
                raise RuntimeError(
                    f"the CPU backend relies on {module.__name__}.{name}, which this version "
                    "does not have; it was written for torchtitan 0.3 and torch 2.15"
                )
            value = getattr(value, part)


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
    """Make this process a CPU rank. Call it before anything imports torchtitan; idempotent."""
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    _require(utils, "device_type", "device_module", "get_device_info", "get_peak_flops")
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
    # torch says so of any CPU mesh, several times per rank; `_draw_whole_parameters` deals with it.
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    utils.device_type = "cpu"
    utils.device_module = _CpuDeviceModule("torchtitan_cpu_device")

    # Both compile create_block_mask, which costs seconds per process and needs a C++ compiler;
    # a mask of these sizes is made faster without. There is no other seam: the decoder and
    # context parallelism call functions that call these globals.
    for name in _COMPILED_MASKS:
        module: Any = importlib.import_module(name)
        _require(module, "_compiled_create_block_mask", "create_block_mask")
        module._compiled_create_block_mask = module.create_block_mask


def adapt(config: "Trainer.Config") -> "Trainer.Config":
    """Put the CPU components into ``config`` (in place), and return it."""
    assert config.model_spec is not None
    for name, relied_on in _RELIED_ON.items():
        _require(importlib.import_module(name), *relied_on)
    config.model_spec = dataclasses.replace(
        config.model_spec, parallelize_fn=_on_cpu(config.model_spec.parallelize_fn)
    )
    config.override.imports = [*config.override.imports, *_OVERRIDES]
    return config


def _on_cpu(parallelize_fn: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """``parallelize_fn``, with its result made ready for Gloo and for the CPU's generator."""

    @functools.wraps(parallelize_fn)
    def parallelize(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = parallelize_fn(*args, **kwargs)
        for module in model.modules():
            _sum_gradients(module)
            _draw_whole_parameters(module)
        return model

    return parallelize


def _sum_gradients(module: torch.nn.Module) -> None:
    """Let FSDP reduce with a plain sum.

    torchtitan sets FSDP's divide factor to 1.0, since it divides the loss by the number of tokens
    itself. FSDP turns any factor into a PREMUL_SUM reduction, which Gloo refuses.
    """
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)


def _draw_whole_parameters(module: Any) -> None:
    """Initialize sharded parameters as if they were whole.

    On a GPU, DTensor gives each shard its own part of the random sequence. It cannot on the CPU,
    where every rank would draw the same numbers for its shard: four ranks, four equal quarters of
    the embedding. Drawn whole on each rank, a parameter does not depend on how it is sharded.
    """
    from torchtitan.models.common.param_init import skip_param_init

    def whole(draw: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
        def draw_whole(param: torch.Tensor) -> None:
            if not isinstance(param, DTensor):
                draw(param)
                return
            full = torch.empty(param.shape, dtype=param.dtype)
            draw(full)
            _copy_whole(full, param)

        return draw_whole

    def reset_whole(reset: Callable[[], None]) -> None:
        sharded = {n: p for n, p in module._parameters.items() if isinstance(p, DTensor)}
        for name, param in sharded.items():
            module._parameters[name] = torch.nn.Parameter(
                torch.empty(param.shape, dtype=param.dtype)
            )
        reset()
        for name, param in sharded.items():
            _copy_whole(module._parameters[name], param)
            module._parameters[name] = param

    draws = getattr(module, "_param_init", None)
    # Instance attributes, as the module's config sets the first. The second is what torchtitan
    # calls without it, as for the MTP layers' projection.
    if draws is not None:
        module._param_init = {
            name: draw if draw is skip_param_init else whole(draw) for name, draw in draws.items()
        }
    elif callable(reset := getattr(module, "reset_parameters", None)):
        module.reset_parameters = functools.partial(reset_whole, reset)


def _copy_whole(full: torch.Tensor, param: DTensor) -> None:
    replicated = DTensor.from_local(
        full, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False
    )
    param.copy_(replicated.redistribute(placements=param.placements))
