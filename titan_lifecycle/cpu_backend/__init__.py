"""Run torchtitan's own trainer on CPU ranks over Gloo.

torchtitan 0.3 trains on accelerators. This package holds every adaptation that a CPU rank needs,
each at the seam torchtitan offers for it, with the reason beside it. Nothing happens on import:

1. `activate` runs in the worker, before torchtitan is imported, and gives torchtitan its device.
2. `device_defaults` are the settings a job on the CPU starts from; the job file overrides them.
3. `adapt` takes the loaded config and puts the component replacements into it.

Each replaced name is checked first; a torchtitan without it is refused with the name, instead of
failing somewhere in the middle of a step.
"""

import dataclasses
from typing import TYPE_CHECKING

from titan_lifecycle.cpu_backend.device import activate, device_defaults, resolve_device
from titan_lifecycle.cpu_backend.parameters import ready_for_gloo

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["activate", "adapt", "device_defaults", "resolve_device"]

# Named by import path, as in a job's override.imports: importing them imports torchtitan.
_OVERRIDES = tuple(
    f"{__name__}.overrides.{name}"
    for name in ("dense_flex_attention", "gloo_token_dispatcher", "same_dtype_gpt_oss_experts")
)


def adapt(config: "Trainer.Config") -> "Trainer.Config":
    """Put the CPU components into ``config`` (in place), and return it."""
    assert config.model_spec is not None
    config.model_spec = dataclasses.replace(
        config.model_spec, parallelize_fn=ready_for_gloo(config.model_spec.parallelize_fn)
    )
    config.override.imports = [*config.override.imports, *_OVERRIDES]
    return config
