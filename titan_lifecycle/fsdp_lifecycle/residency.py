"""How many bytes of gathered weights and unsharded gradients a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn as nn

from titan_lifecycle.fsdp_lifecycle.listening import (
    Listener,
    Tree,
    Unit,
    post_backward_node,
    unit_of,
)
from titan_lifecycle.fsdp_lifecycle.private import fsdp_groups, fsdp_modules, unsharded_parameters


class ResidencyMonitor(Listener):
    """While entered, keeps the peak bytes of gathered weights and of unsharded gradients.

    Read from the groups' real tensors on this rank, whenever a group has been gathered and
    whenever one is about to be reduced or to keep its gradients: the moments at which either is
    largest. For measurements; it looks at every group each time.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = [*models]
        self._groups = fsdp_groups(models)
        states = dict.fromkeys(module._get_fsdp_state() for module in fsdp_modules(models))
        self._states = [*states]
        self._trees: list[Tree] = []
        self.is_in_use = False
        self.reset()

    def reset(self) -> None:
        self.peak_weight_bytes = 0
        self.peak_gradient_bytes = 0

    def sample(self) -> None:
        self.peak_weight_bytes = max(self.peak_weight_bytes, self.weight_bytes())
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, self.gradient_bytes())

    def weight_bytes(self) -> int:
        """Bytes of the weights that are gathered now."""
        return sum(
            parameter.nbytes
            for group in self._groups
            if group.is_unsharded
            for parameter in unsharded_parameters(group)
        )

    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients that exist now."""
        return sum(
            parameter.grad.nbytes
            for group in self._groups
            for parameter in unsharded_parameters(group)
            if parameter.grad is not None
        )

    def __enter__(self) -> ResidencyMonitor:
        self.is_in_use = True
        for state in self._states:
            unit_of(state).add(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_in_use = False
        for state in self._states:
            unit_of(state).listeners.remove(self)
        for tree in self._trees:
            tree.listeners.remove(self)
        self._trees.clear()

    # The moments #

    def join(self, tree: Tree) -> None:
        if tree not in self._trees:
            self._trees.append(tree)
            tree.listeners.append(self)

    def gathered(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> None:
        self.sample()
        for group in unit.groups:
            if (node := post_backward_node(group, inputs)) is not None:
                node.register_prehook(self._sample_in_backward)

    def left_forward(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        for output in outputs:
            output.register_hook(self._sample_in_backward)

    def _sample_in_backward(self, grads: Any) -> None:
        if self.is_in_use:
            self.sample()

    def enter_scope(self, unit: Unit) -> None:
        self.sample()

    def leave_scope(self, unit: Unit) -> None:
        self.sample()

    def before_end(self) -> None:
        self.sample()

    def before_finalization(self) -> None:
        self.sample()
