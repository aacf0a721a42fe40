"""A chunked loss whose inner backwards are scoped: a drop-in for torchtitan's wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import spmd_types as spmd
import torch
import torch.nn as nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed.utils import get_spmd_backend

from titan_lifecycle import private_names
from titan_lifecycle.fsdp_lifecycle import PartialBackwardHooks
from titan_lifecycle.jobs.renamed_keys import HEAD_REDUCTION_OF_LOSS, with_renamed_fields
from titan_lifecycle.losses.chunk_loop import (
    Chunk,
    Sequences,
    checked,
    chunk_sizes,
    run_chunks,
)
from titan_lifecycle.losses.from_weight import (
    HeadWeightLoss,
    check_head_is_linear,
    loss_from_weight,
)

__all__ = ["LifecycleChunkedLoss"]

private_names.check("losses of torchtitan")

_DEFAULT_NUM_CHUNKS = 8


class LifecycleChunkedLoss(ChunkedLossWrapper):
    """Runs ``lm_head -> loss -> backward`` per sequence chunk, with FSDP's lifecycle owned.

    Flow for ``loss, metrics = loss_fn(hidden, labels, global_valid_tokens)``:

    1. ``hidden`` [B, L, D], the decoder's output with the head skipped, is detached and split
       along the sequence into N chunks; so are ``labels`` [B, L] and every tensor in
       ``**loss_inputs``.
    2. Per chunk, inside one ``fsdp_partial_backwards`` scope: head, inner loss, backward.
    3. The chunks' gradients are assembled into one [B, L, D], which ``loss.backward()`` carries
       through the decoder. Whatever gradient reaches the loss itself is taken for 1, since the
       head's part has been accumulated by then: do not scale the returned loss.

    Nothing is backpropagated where gradients are disabled, or where neither ``hidden`` nor the
    head needs one. With a frozen decoder only the head is trained, and ``loss.backward()`` is
    valid and does nothing.

    Several predictions of one head: ``hidden`` and ``labels`` are tuples of the same length. Per
    chunk the head runs on every prediction, and the inner loss gets tuples.

    Composition:

    - FSDP2, HSDP, ``replicate()``, pipelines: see ``fsdp_partial_backwards``.
    - TP and SP: hidden states may be DTensors; the local sequence is split. With torchtitan's
      ``spmd_types`` backend the head is vocabulary-parallel and the inner loss reduces over it.
    - CP: the rank's own part of the sequence is split.
    - Compile: the inner loss may be compiled, the head is not. A sequence length that is not a
      multiple of N gives chunks of two lengths, hence two compilations. While tracing, a symbolic
      length is specialized unless it is, or may be, a multiple.
    """

    @with_renamed_fields(reduction=HEAD_REDUCTION_OF_LOSS)
    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        num_chunks: int | None = None
        """Number of chunks; their lengths differ by at most one token. Default 8."""

        chunk_tokens: int | None = None
        """Length of a chunk, in tokens of the rank's own sequence, instead of num_chunks; the
        last chunk may be shorter."""

        loss_fn: BaseLoss.Config = field(default_factory=CrossEntropyLoss.Config)
        """Inner loss, applied to each chunk's logits."""

        head_reduction: Literal["compatible", "coalesced"] | None = None
        """Who reduces the head's gradients where there is a choice. compatible, the default: the
        chunk loop, bit for bit as torchtitan's wrapper. coalesced: the decoder's backward, together
        with the rest of the head's FSDP group, one reduce-scatter fewer. For torchtitan's own
        trainer; a job has ``lifecycle.head_reduction`` for it and leaves this unset."""

        def __post_init__(self) -> None:
            for name in ("num_chunks", "chunk_tokens"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"loss.{name} must be at least 1, got {value}")
            if self.num_chunks is not None and self.chunk_tokens is not None:
                raise ValueError(
                    f"loss.num_chunks ({self.num_chunks}) and loss.chunk_tokens "
                    f"({self.chunk_tokens}) exclude each other; set one of them"
                )

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.num_chunks = config.num_chunks or _DEFAULT_NUM_CHUNKS
        self.chunk_tokens = config.chunk_tokens
        self.head_reduction = config.head_reduction or "compatible"
        self.loss_fn = config.loss_fn.build(compile_config=compile_config)
        self.lm_head: nn.Module | None = None

    def __call__(
        self,
        pred: torch.Tensor | tuple[torch.Tensor, ...],
        labels: torch.Tensor | tuple[torch.Tensor, ...],
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, summed over chunks, and the inner loss's metrics.

        Args:
            pred: Hidden states [B, L, D], or a tuple of them.
            labels: Token ids [B, L], or a tuple, one for each prediction.
            global_valid_tokens: Scalar that normalizes the loss, handed to the inner loss.
            **loss_inputs: Handed to the inner loss; tensors [B, L, ...] are split along dim 1.

        Raises:
            RuntimeError: ``set_lm_head`` was not called.
            TypeError: The head is not a module; a prediction or labels are no tensor; the inner
                loss does not return a loss and metrics.
            ValueError: Predictions, labels, head and loss inputs do not match, some predictions
                require grad and others do not, or there are more chunks than tokens.
        """
        lm_head = _check_head(self.lm_head)
        if isinstance(self.loss_fn, HeadWeightLoss):
            check_head_is_linear(lm_head, self.loss_fn)
        sequences = Sequences.of(pred, labels, loss_inputs, lm_head)

        def inner_loss(chunk: Chunk, hooks: PartialBackwardHooks) -> Any:
            if isinstance(self.loss_fn, HeadWeightLoss):
                return loss_from_weight(self.loss_fn, lm_head, chunk, hooks, global_valid_tokens)
            return _loss_from_logits(self.loss_fn, lm_head, chunk, hooks, global_valid_tokens)

        with spmd.local():
            zero = _zero_loss(sequences.hiddens[0])
            sizes = chunk_sizes(sequences.local_length, self.num_chunks, self.chunk_tokens)
        return run_chunks(
            lm_head,
            sequences,
            sizes,
            inner_loss,
            total_loss=zero,
            combine_metrics=self._combine_chunk_metrics,
            reduction=self.head_reduction,
        )


def _loss_from_logits(
    loss_fn: Any,
    lm_head: nn.Module,
    chunk: Chunk,
    hooks: PartialBackwardHooks,
    global_valid_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Sequence[torch.Tensor]]:
    """The loss of a chunk's logits; the head runs once for each prediction."""
    logits = []
    for i, hidden in enumerate(chunk.hiddens):
        if chunk.is_last and i == len(chunk.hiddens) - 1:
            hooks.before_last_forward()
        logits.append(lm_head(hidden))
    outputs = hooks.after_forward(tuple(logits))
    pred = outputs if chunk.has_several else outputs[0]
    loss, metrics = checked(loss_fn, pred, chunk.labels, global_valid_tokens, chunk.loss_inputs)
    return loss, metrics, [output for output in outputs if output.requires_grad]


def _check_head(lm_head: Any) -> nn.Module:
    if lm_head is None:
        raise RuntimeError(
            "LifecycleChunkedLoss has no head; call set_lm_head(model.lm_head) before the "
            "first loss, and let the model return hidden states (model._skip_lm_head = True)"
        )
    if not isinstance(lm_head, nn.Module):
        raise TypeError(
            f"LifecycleChunkedLoss.set_lm_head got a {type(lm_head).__name__}; expected the module "
            "that owns the head's parameters, like model.lm_head, so that they are gathered and "
            "trained. Wrap a function in an nn.Module that has them"
        )
    return lm_head


def _zero_loss(reference: torch.Tensor) -> torch.Tensor:
    zero = reference.new_zeros((), dtype=torch.float32)
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        # The type of torchtitan's losses: a partial sum over data, whole on each TP rank.
        for axis, dst in {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I}.items():
            zero = spmd.mutate_type(zero, axis, src=spmd.R, dst=dst)
    return zero
