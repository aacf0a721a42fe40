"""An FSDP root at the start of an iteration, and kept as it is by a pipeline stage's probe."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from titan_lifecycle.fsdp_lifecycle.private import fsdp_groups


def reset_root(module: nn.Module) -> None:
    """Bring an FSDP root back to the start of an iteration; see ``pipeline.reset_iteration``.

    Nothing is done for a module that is not FSDP, or has never run.

    Raises:
        RuntimeError: ``module`` is an FSDP module but not the root.
    """
    # torch's reset needs what the root's first forward sets up.
    if not isinstance(module, FSDPModule) or not module._get_fsdp_state()._state_ctx.all_states:
        return
    module.reset_iter_state()
    module.set_manual_backward_finalization(False)


class ProbeGuard:
    """Keeps the initialization of a pipeline stage from changing FSDP's state.

    torch clears ``param.grad`` when it is done, also that of a finished step. With dynamic shapes
    it also runs a probe, a real forward and backward: created before it, this lets no group reduce,
    and :meth:`restore` after it, also when it failed, drops the iteration state it left, unsharded
    gradients among it. Waits for pytorch/pytorch#203178.
    """

    def __init__(self, root: nn.Module, *, runs_probe: bool) -> None:
        self._root = root
        self._runs_probe = runs_probe
        groups = fsdp_groups([root])
        # While a group is gathered, the module holds its unsharded parameters and not the sharded
        # ones, which own the reduced gradients.
        sharded = [p.sharded_param for group in groups for p in group.fsdp_params]
        self._gradients = [(p, p.grad) for p in {*sharded, *root.parameters()}]
        # Not the whole policy: the root's first forward may be the probe's, and it settles whether
        # the root reshards.
        self._reduces = [(group, group.reduce_grads) for group in groups]
        if runs_probe:
            for parameter, _ in self._gradients:
                parameter.grad = None
            for group, _ in self._reduces:
                group.reduce_grads = False

    def restore(self) -> None:
        try:
            if self._runs_probe:
                reset_root(self._root)
        finally:
            for group, reduces in self._reduces:
                group.reduce_grads = reduces
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
