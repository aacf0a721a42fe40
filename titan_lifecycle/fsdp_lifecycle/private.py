"""FSDP2's private classes, and what the package reads of them.

What is imported and read is declared in ``private_names`` and checked here, when the package is
imported. The other modules of the package take the classes from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from titan_lifecycle import private_names

private_names.check("FSDP2")

from torch.distributed import _spmd_no_typecheck as spmd_no_typecheck  # noqa: E402
from torch.distributed._composable_state import (  # noqa: E402
    _module_state_mapping as module_state_mapping,
)
from torch.distributed.fsdp._common_utils import collect_grad_tensors  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # noqa: E402
    DDPMeshInfo,
    FSDPMeshInfo,
    TrainingState,
    is_bw,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_state import (  # noqa: E402
    FSDPState,
    FSDPStateContext,
)

__all__ = [
    "DDPMeshInfo",
    "FSDPMeshInfo",
    "FSDPParamGroup",
    "FSDPState",
    "FSDPStateContext",
    "TrainingState",
    "collect_grad_tensors",
    "forward_hook_id",
    "fsdp_groups",
    "fsdp_modules",
    "fsdp_process_groups",
    "group_fqn",
    "groups_of",
    "groups_with_pending_gradients",
    "is_bw",
    "is_manually_finalized",
    "module_name",
    "module_state_mapping",
    "modules_of",
    "pending_groups",
    "spmd_no_typecheck",
    "trainable_parameters",
    "unsharded_gradient_bytes",
    "unsharded_parameters",
]


def groups_with_pending_gradients(root: nn.Module) -> list[str]:
    """FQNs of the groups whose gradients wait for a reduction, unsharded or as partial sums."""
    return [group_fqn(group) for group in pending_groups(fsdp_groups([root]))]


def fsdp_process_groups(models: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The distinct process groups over which the FSDP groups in ``models`` communicate."""
    found: list[dist.ProcessGroup | None] = []
    for group in fsdp_groups(models):
        mesh_info = group.mesh_info
        if isinstance(mesh_info, FSDPMeshInfo):
            found += [mesh_info.shard_process_group, mesh_info.reduce_scatter_process_group]
        if isinstance(mesh_info, DDPMeshInfo):
            found.append(mesh_info.replicate_process_group)
    return list({id(pg): pg for pg in found if pg is not None}.values())


def unsharded_gradient_bytes(models: Iterable[nn.Module]) -> dict[str, int]:
    """Bytes of each FSDP group's unsharded gradients on this rank, by the group's first parameter.

    What deferring the reduction keeps alive between microbatches: every trainable parameter whole,
    in the dtype it is reduced in. Works before the first forward, also on the meta device.
    """
    sizes: dict[str, int] = {}
    for model in models:
        names = {param: name for name, param in model.named_parameters()}
        for group in fsdp_groups([model]):
            trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            if trainable:
                sizes[names[trainable[0].sharded_param]] = sum(
                    math.prod(p._orig_size)
                    * (p.mp_policy.reduce_dtype or p.sharded_param.dtype).itemsize
                    for p in trainable
                )
    return sizes


def group_fqn(group: FSDPParamGroup) -> str:
    """The FQNs of the group's modules, known after the root's first forward."""
    return group._module_fqn or "<root>"


def trainable_parameters(group: FSDPParamGroup) -> list[nn.Parameter]:
    """The unsharded parameters that require grad; empty before the first gather."""
    return [
        p._unsharded_param
        for p in group.fsdp_params
        if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")
    ]


def unsharded_parameters(group: FSDPParamGroup) -> list[nn.Parameter]:
    # Absent until the group has been gathered once.
    return [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]


def modules_of(state: FSDPState) -> list[FSDPModule]:
    """The modules that share ``state``, in the order in which FSDP got them."""
    return [cast(FSDPModule, module) for module in state._modules]


def forward_hook_id(hooks: Mapping[int, Any], state: FSDPState) -> int:
    """The id of FSDP's own hook among the forward hooks, or pre-hooks, of a module of ``state``."""
    for hook_id, hook in hooks.items():
        # A method of the state, or a function that wraps one.
        while hook is not None and getattr(hook, "__self__", None) is not state:
            hook = getattr(hook, "__wrapped__", None)
        if hook is not None:
            return hook_id
    raise RuntimeError(private_names.unsupported("a module of a unit has no forward hook of FSDP"))


def fsdp_groups(models: Iterable[nn.Module]) -> list[FSDPParamGroup]:
    """Every FSDP group in ``models``, once, in module order."""
    groups = {id(group): group for module in fsdp_modules(models) for group in groups_of(module)}
    return list(groups.values())


def fsdp_modules(models: Iterable[nn.Module]) -> Iterator[FSDPModule]:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield module


def groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    return module._get_fsdp_state()._fsdp_param_groups


def module_name(module: FSDPModule) -> str:
    """The FQNs of the modules of ``module``'s group, known after the root's first forward."""
    fqns = [group._module_fqn for group in groups_of(module) if group._module_fqn]
    return fqns[0] if fqns else type(module).__name__.removeprefix("FSDP")


def is_manually_finalized(context: FSDPStateContext[FSDPState]) -> bool:
    """Whether the caller, a pipeline's schedule, finalizes the backward under way or to come."""
    # The mode is latched when the first backward starts.
    if context.manual_backward_finalization_active is not None:
        return context.manual_backward_finalization_active
    return context.manual_backward_finalization


def pending_groups(groups: Iterable[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """Groups in which earlier microbatches left gradients unsharded, or as HSDP partial sums."""
    return [g for g in groups if g._post_backward_pending or g._partial_reduce_output is not None]
