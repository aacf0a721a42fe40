"""How many bytes of gathered weights and unsharded gradients a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.nn as nn

from titan_lifecycle.fsdp_lifecycle.private import fsdp_groups, unsharded_parameters


class ResidencyMonitor:
    """While entered, keeps the peak bytes of gathered weights and of unsharded gradients.

    Read from the groups' real tensors on this rank, whenever a group has been gathered and
    whenever one is about to be reduced or to keep its gradients: the moments at which either is
    largest. For measurements; it looks at every group each time.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._groups = fsdp_groups(models)
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
        for group in self._groups:
            # On the instance, so that leaving it is a deletion.
            group.wait_for_unshard = self._then_sample(group.wait_for_unshard)  # type: ignore[method-assign]
            group.post_backward = self._sample_then(group.post_backward)  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for group in self._groups:
            del group.wait_for_unshard, group.post_backward

    def _then_sample(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            method(*args)
            self.sample()

        return call

    def _sample_then(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.sample()
            method(*args)

        return call
