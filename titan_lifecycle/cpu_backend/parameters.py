"""How FSDP reduces and parameters are initialized on the CPU, for Gloo and the CPU's generator."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["ready_for_gloo"]


def ready_for_gloo(
    parallelize_fn: Callable[..., torch.nn.Module],
) -> Callable[..., torch.nn.Module]:
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
