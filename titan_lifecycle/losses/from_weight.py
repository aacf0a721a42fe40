"""Inner losses that take the head's weight instead of logits, as fused kernels do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from titan_lifecycle.fsdp_lifecycle import PartialBackwardHooks
from titan_lifecycle.losses.chunk_loop import Chunk, checked

__all__ = ["HeadWeightLoss", "LinearCrossEntropyLoss", "check_head_is_linear", "loss_from_weight"]


class HeadWeightLoss(BaseLoss):
    """An inner loss that takes the head's weight instead of logits, as fused kernels do.

    Subclasses implement ``__call__(hidden, labels, global_valid_tokens, *, weight, bias, **inputs)
    -> (loss, metrics)``: ``hidden`` is one chunk [B, L/N, D] (or a tuple of them), ``weight`` the
    head's gathered weight [V, D] and ``bias`` its bias [V] or ``None``. Both are valid during the
    call only.
    """


class LinearCrossEntropyLoss(HeadWeightLoss):
    """Cross-entropy from the head's weight, with torch's ``linear_cross_entropy``.

    It runs without ``options``: torch's reference path, which materializes the logits of a chunk
    and spares copies of them. Sum reduction over valid tokens, divided by ``global_valid_tokens``,
    as torchtitan's ``CrossEntropyLoss``. A vocabulary-parallel head is refused.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.fn = F.linear_cross_entropy
        self._maybe_compile(compile_config)

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = self.fn(
            pred.flatten(0, 1),
            kwargs["weight"],
            labels.flatten(0, 1),
            linear_bias=kwargs["bias"],
            reduction="sum",
            ignore_index=IGNORE_INDEX,
        )
        if global_valid_tokens is not None:
            loss = loss / global_valid_tokens
        return loss, {}


def loss_from_weight(
    loss_fn: HeadWeightLoss,
    lm_head: nn.Module,
    chunk: Chunk,
    hooks: PartialBackwardHooks,
    global_valid_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Sequence[torch.Tensor]]:
    """The loss of a chunk from the weight of ``lm_head``; see ``chunk_loop.InnerLoss``."""
    weight: Any = lm_head.weight
    bias = getattr(lm_head, "bias", None)
    inputs = chunk.loss_inputs | {"weight": weight, "bias": bias}

    def loss_of_hidden(*hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
        pred = hidden if chunk.has_several else hidden[0]
        return checked(loss_fn, pred, chunk.labels, global_valid_tokens, inputs)

    if chunk.is_last:
        hooks.before_last_forward()
    # The loss runs as the head's forward: hooks on it cast the hidden states, as a mixed-precision
    # policy says, and others see it like any other forward.
    with _forward_replaced(lm_head, loss_of_hidden):
        loss, metrics = lm_head(*chunk.hiddens)
    loss = hooks.after_forward(loss)
    sources = [t for t in (*chunk.hiddens, weight, bias) if t is not None and t.requires_grad]
    return loss, metrics, sources


def check_head_is_linear(lm_head: nn.Module, loss_fn: HeadWeightLoss) -> None:
    """A loss that takes the weight instead of logits replaces the head's own forward."""
    extra = sorted({name for name, _ in lm_head.named_parameters()} - {"weight", "bias"})
    # The class's forward: torchtitan wraps the instance's, to redistribute what goes in and out.
    if extra or type(lm_head).forward is not nn.Linear.forward:
        raise TypeError(
            f"{type(loss_fn).__name__} takes the head's weight in place of logits, and a "
            f"{type(lm_head).__name__} is not just that"
            + (f": it also has {', '.join(extra)}" if extra else "")
            + "; use a loss on logits, as CrossEntropyLoss, or a plain linear head"
        )
    vocabulary_parallel = isinstance(lm_head.weight, DTensor) and any(
        dim_name == "tp" for dim_name in lm_head.weight.device_mesh.mesh_dim_names or ()
    )
    if vocabulary_parallel or (get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1):
        raise TypeError(
            f"{type(loss_fn).__name__} needs the whole vocabulary on each rank, and the head is "
            "split over the TP axis; use a loss on logits, as CrossEntropyLoss, or "
            "parallelism.tensor_parallel_degree = 1"
        )


@contextmanager
def _forward_replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    original = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original
