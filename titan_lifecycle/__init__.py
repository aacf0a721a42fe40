"""An owner for the FSDP2 lifecycle around torchtitan's chunked losses and pipelines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_lifecycle.fsdp_lifecycle import (
        PartialBackwardHooks,
        complete_fsdp_grouped_forward,
        disable_forward_prefetch_in_backward,
        fsdp_partial_backwards,
    )
    from titan_lifecycle.fsdp_lifecycle.invocations import (
        register_lifecycle_callbacks,
        set_repeated_units,
    )
    from titan_lifecycle.losses.chunked import LifecycleChunkedLoss
    from titan_lifecycle.pipeline import (
        observe_split_backwards,
        register_metadata_inference_cleanup,
        reset_iteration,
    )

__version__ = "0.1.0"

__all__ = [
    "LifecycleChunkedLoss",
    "PartialBackwardHooks",
    "complete_fsdp_grouped_forward",
    "disable_forward_prefetch_in_backward",
    "fsdp_partial_backwards",
    "observe_split_backwards",
    "register_lifecycle_callbacks",
    "register_metadata_inference_cleanup",
    "reset_iteration",
    "set_repeated_units",
]

# Imported on first use: torchtitan picks its device when it is imported, and the CPU backend, like
# `titan-lifecycle --help`, must come before that.
_MODULES = {
    "LifecycleChunkedLoss": "losses.chunked",
    "PartialBackwardHooks": "fsdp_lifecycle",
    "complete_fsdp_grouped_forward": "fsdp_lifecycle",
    "disable_forward_prefetch_in_backward": "fsdp_lifecycle",
    "fsdp_partial_backwards": "fsdp_lifecycle",
    "observe_split_backwards": "pipeline",
    "register_lifecycle_callbacks": "fsdp_lifecycle.invocations",
    "register_metadata_inference_cleanup": "pipeline",
    "reset_iteration": "pipeline",
    "set_repeated_units": "fsdp_lifecycle.invocations",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
