"""A group's communication policy by value: captured, and restored whatever was set meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from titan_lifecycle.fsdp_lifecycle.private import FSDPParamGroup, fsdp_groups, fsdp_modules


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """One group's communication policy, captured and restored by value.

    torch's setters cannot restore: ``set_requires_gradient_sync`` overwrites the separate
    all-reduce flag of HSDP, and ``set_reshard_after_forward`` takes only a bool and ends the
    "not set by the user" policy for good. Waits for pytorch/pytorch#203177.
    """

    reduce_grads: bool
    all_reduce_grads: bool
    reshard_after_backward: bool
    # ``None`` keeps the weights after forward; the group's own mesh frees them; another mesh
    # reshards to that size (an integer ``reshard_after_forward``).
    post_forward_mesh_info: Any

    @classmethod
    def capture(cls, group: FSDPParamGroup) -> GroupPolicy:
        return cls(
            group.reduce_grads,
            group.all_reduce_grads,
            group.reshard_after_backward,
            group.post_forward_mesh_info,
        )

    def restore(self, group: FSDPParamGroup) -> None:
        group.reduce_grads = self.reduce_grads
        group.all_reduce_grads = self.all_reduce_grads
        group.reshard_after_backward = self.reshard_after_backward
        group.post_forward_mesh_info = self.post_forward_mesh_info


@contextmanager
def preserved_policies(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore every FSDP group's policy on leaving, by value, whatever the block sets.

    Reduction, all-reduce, reshard after forward (also to a mesh, also "not set by the user") and
    after backward. Waits for pytorch/pytorch#203177.
    """
    policies = [(group, GroupPolicy.capture(group)) for group in fsdp_groups(models)]
    states = {module._get_fsdp_state() for module in fsdp_modules(models)}
    automatic = [(state, state._auto_reshard_after_forward) for state in states]
    try:
        yield
    finally:
        for group, policy in policies:
            policy.restore(group)
        for state, value in automatic:
            state._auto_reshard_after_forward = value
            if value and state._state_ctx.all_states[:1] == [state]:
                # Its first forward, which may have been in the block, made it keep its weights.
                for group in state._fsdp_param_groups:
                    group.post_forward_mesh_info = None
