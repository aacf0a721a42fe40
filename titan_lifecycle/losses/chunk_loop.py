"""The loop over the chunks of a sequence: split, one scope, assemble.

It knows nothing of torchtitan, and of FSDP only the scope, ``fsdp_partial_backwards``: see
[Note: Partial backwards and FSDP finalization] there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import local_map
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_true

from titan_lifecycle.fsdp_lifecycle import PartialBackwardHooks, Reduction, fsdp_partial_backwards

__all__ = ["Chunk", "InnerLoss", "Sequences", "checked", "chunk_sizes", "run_chunks"]

_SEQUENCE_DIM = 1

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of every sequence."""

    hiddens: tuple[torch.Tensor, ...]
    """Detached hidden states [B, L/N, D] of each prediction."""
    labels: torch.Tensor | tuple[torch.Tensor, ...]
    """Token ids [B, L/N], or a tuple where the loss takes several predictions."""
    loss_inputs: dict[str, Any]
    """What else the inner loss takes."""
    is_last: bool

    @property
    def has_several(self) -> bool:
        """Whether the inner loss takes tuples, one entry for each prediction."""
        return isinstance(self.labels, tuple)


InnerLoss = Callable[
    [Chunk, PartialBackwardHooks], tuple[torch.Tensor, Metrics, Sequence[torch.Tensor]]
]
"""The loss of a chunk, its metrics, and what requires grad of what came out of the head (or of its
weight and what goes in). It calls the hooks around the head's forwards."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """What is split along the sequence."""

    hiddens: tuple[torch.Tensor, ...]
    """Hidden states [B, L, D] of each prediction."""
    labels: tuple[torch.Tensor, ...]
    """Token ids [B, L] of each prediction."""
    loss_inputs: dict[str, Any]
    """Tensors [B, L, ...], which are split, and what else the inner loss takes."""
    has_several: bool
    """Whether predictions and labels came as tuples."""

    @classmethod
    def of(
        cls, pred: Any, labels: Any, loss_inputs: dict[str, Any], lm_head: nn.Module
    ) -> Sequences:
        """The sequences of a loss call, checked.

        Raises:
            TypeError: A prediction or labels are no tensor.
            ValueError: Predictions, labels, head and loss inputs do not match.
        """
        _check_tensors(pred, "prediction", "hidden states [B, L, D]")
        _check_tensors(labels, "labels", "token ids [B, L]")
        hiddens = (pred,) if isinstance(pred, torch.Tensor) else tuple(pred)
        targets = (labels,) if isinstance(labels, torch.Tensor) else tuple(labels)
        _check_aligned(hiddens, targets)
        _check_head_takes(lm_head, hiddens)
        _check_loss_inputs(hiddens[0], loss_inputs)
        return cls(hiddens, targets, loss_inputs, not isinstance(pred, torch.Tensor))

    @property
    def local_length(self) -> int:
        """The length of this rank's own part."""
        return _local_length(self.hiddens[0])

    def split(self, sizes: list[int], *, requires_grad: bool) -> list[Chunk]:
        """The chunks of these lengths, their hidden states detached and leaves."""
        hiddens = [
            tuple(c.detach().requires_grad_(requires_grad) for c in _split(h, sizes))
            for h in self.hiddens
        ]
        labels = [_split(t, sizes) for t in self.labels]
        inputs = {
            key: _split(value, sizes)
            for key, value in self.loss_inputs.items()
            if isinstance(value, torch.Tensor)
        }
        return [
            Chunk(
                tuple(chunks[i] for chunks in hiddens),
                tuple(chunks[i] for chunks in labels) if self.has_several else labels[0][i],
                self.loss_inputs | {key: chunks[i] for key, chunks in inputs.items()},
                is_last=i == len(sizes) - 1,
            )
            for i in range(len(sizes))
        ]


def run_chunks(
    lm_head: nn.Module,
    sequences: Sequences,
    sizes: list[int],
    inner_loss: InnerLoss,
    *,
    total_loss: torch.Tensor,
    combine_metrics: Callable[[Metrics, Metrics], Metrics],
    reduction: Reduction,
) -> tuple[torch.Tensor, Metrics]:
    """Run every chunk and its backward in one scope of ``lm_head``.

    Args:
        lm_head: The module that owns the head's parameters.
        sequences: What is split.
        sizes: The lengths of the chunks.
        inner_loss: Runs the head and the loss of one chunk.
        total_loss: The zero to which the chunks' losses are added.
        combine_metrics: Adds the metrics of one chunk to those of the earlier ones.
        reduction: See ``fsdp_partial_backwards``.

    Returns:
        The loss, whose backward carries the assembled gradients to the decoder, and the metrics.
    """
    hiddens = sequences.hiddens
    outer_backward = torch.is_grad_enabled() and hiddens[0].requires_grad
    run_backward = outer_backward or (
        torch.is_grad_enabled() and any(p.requires_grad for p in lm_head.parameters())
    )
    metrics: Metrics = {}
    with spmd.local():
        gradients = [_SequenceGradient(h) for h in hiddens] if outer_backward else []
        backward = _InnerBackward() if run_backward else None
        chunks = sequences.split(sizes, requires_grad=outer_backward)
        with fsdp_partial_backwards(
            lm_head,
            run_backward=run_backward,
            outer_backward_follows=outer_backward,
            reduction=reduction,
        ) as hooks:
            for chunk in chunks:
                loss, chunk_metrics = _run_chunk(inner_loss, chunk, hooks, backward, gradients)
                metrics = combine_metrics(metrics, chunk_metrics)
                total_loss = total_loss + loss
    if not run_backward:
        return total_loss, metrics
    with spmd.no_typecheck():
        if not outer_backward:
            # The trainer and the pipeline stage call backward() on what they get.
            return total_loss.requires_grad_(), metrics
        assembled = (gradient.result() for gradient in gradients)
        return _CarryGradients.apply(total_loss, *hiddens, *assembled), metrics


def _run_chunk(
    inner_loss: InnerLoss,
    chunk: Chunk,
    hooks: PartialBackwardHooks,
    backward: _InnerBackward | None,
    gradients: list[_SequenceGradient],
) -> tuple[torch.Tensor, Metrics]:
    """The loss of one chunk, backpropagated; on return its logits are gone."""
    loss, metrics, sources = inner_loss(chunk, hooks)
    if backward is not None:
        with spmd.no_typecheck():
            backward(loss, sources, chunk.hiddens)
            for gradient, hidden in zip(gradients, chunk.hiddens, strict=False):
                gradient.append(hidden)
    return loss.detach(), metrics


def chunk_sizes(length: int, num_chunks: int, chunk_tokens: int | None) -> list[int]:
    """The lengths of the chunks of a sequence: ``num_chunks`` of them, or of ``chunk_tokens``.

    Raises:
        ValueError: The sequence is empty, is shorter than ``num_chunks``, or is traced and of
            unknown length.
    """
    if isinstance(length, int) and length == 0:
        raise ValueError(
            "LifecycleChunkedLoss got hidden states of length 0, [B, 0, D]; expected at least "
            "one token. Skip the loss of an empty sequence, on all ranks alike"
        )
    if chunk_tokens is not None:
        if free_unbacked_symbols(length):
            raise ValueError(
                f"loss.chunk_tokens ({chunk_tokens}) gives an unknown number of chunks of "
                "a traced sequence of unknown length; set loss.num_chunks instead"
            )
        whole, rest = divmod(int(length), chunk_tokens)
        return [chunk_tokens] * whole + ([rest] if rest else [])
    n = num_chunks
    if isinstance(length, torch.SymInt):
        # Chunks of one length need no specialization on it. An unknown length is taken to be
        # a multiple, which the traced graph asserts.
        if guard_or_true(length % n == 0):
            torch._check(
                length % n == 0,
                lambda: f"a traced sequence length must be divisible by loss.num_chunks ({n})",
            )
            return [length // n] * n
        length = int(length)
    if length < n:
        raise ValueError(
            f"loss.num_chunks ({n}) is more than the {length} tokens of this rank's sequence; "
            f"set it to at most {length}, or set loss.chunk_tokens instead"
        )
    base, longer = divmod(length, n)
    return [base + 1] * longer + [base] * (n - longer)


def checked(
    loss_fn: Any,
    pred: Any,
    labels: Any,
    global_valid_tokens: torch.Tensor | None,
    loss_inputs: dict[str, Any],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the inner loss returns, if that is a loss and metrics."""
    result = loss_fn(pred, labels, global_valid_tokens, **loss_inputs)
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[0], torch.Tensor)
        and result[0].ndim == 0
        and isinstance(result[1], dict)
    ):
        return result
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    found = (
        f"a tuple of {', '.join(map(_describe, result))}"
        if isinstance(result, tuple)
        else _describe(result)
    )
    raise TypeError(
        f"the inner loss {name} returned {found}; expected (loss, metrics), where loss is a tensor "
        "of shape () and metrics a dict of tensors, which may be empty"
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}" if value is not None else "None"


class _InnerBackward:
    """Backpropagates a chunk's loss, or a gradient of zero where it does not depend on the head.

    A loss may be a constant, as some are for ignored labels only, and may say that it requires grad
    all the same. The parameters need a gradient then, too: all ranks reduce the same ones.
    """

    def __init__(self) -> None:
        # Whether the head is known to pass gradients on, so that those of the hidden states tell.
        self._hidden_tells = False

    def __call__(
        self,
        loss: torch.Tensor,
        sources: Sequence[torch.Tensor],
        hiddens: Sequence[torch.Tensor],
    ) -> None:
        """``sources``: what came out of the head, or its weight and what goes in, requiring grad.

        ``hiddens`` have no gradient yet.
        """
        if self._hidden_tells:
            if loss.requires_grad:
                loss.backward()
            is_reached = any(hidden.grad is not None for hidden in hiddens)
        else:
            reached: list[torch.Tensor] = []
            handles = [source.register_hook(reached.append) for source in sources]
            if loss.requires_grad:
                loss.backward()
            for handle in handles:
                handle.remove()
            is_reached = bool(reached)
            self._hidden_tells = is_reached and any(h.grad is not None for h in hiddens)
        if sources and not is_reached:
            torch.autograd.backward(sources, [torch.zeros_like(source) for source in sources])


class _SequenceGradient:
    """The gradient of one detached, split tensor, assembled chunk by chunk.

    As torchtitan's ``GradAccumulator``, which assumes chunks of one length. The buffer has the
    reference's dtype: each position is written once, so a wider one would hold the same values.
    """

    def __init__(self, reference: torch.Tensor) -> None:
        self._reference = reference
        self._buffer = torch.zeros_like(
            reference.to_local() if isinstance(reference, DTensor) else reference
        )
        self._length = 0
        # Of the gradients, not of the reference: with a vocabulary-parallel head they are partial
        # sums over the TP axis, which autograd reduces once, on the way into the decoder.
        self._placements: Any = None

    def append(self, chunk: torch.Tensor) -> None:
        """Take the next chunk's ``.grad`` and clear it."""
        gradient, chunk.grad = chunk.grad, None
        start, self._length = self._length, self._length + _local_length(chunk)
        if gradient is None:
            return  # several predictions, and the loss of this chunk does not use this one
        if isinstance(gradient, DTensor):
            if self._placements not in (None, gradient.placements):
                raise RuntimeError(
                    f"chunk gradients have placements {gradient.placements} after "
                    f"{self._placements}; the head must treat every chunk alike"
                )
            self._placements = gradient.placements
            gradient = gradient.to_local()
        self._buffer.narrow(_SEQUENCE_DIM, start, gradient.shape[_SEQUENCE_DIM]).copy_(gradient)

    def result(self) -> torch.Tensor:
        if not isinstance(self._reference, DTensor):
            return self._buffer
        return DTensor.from_local(
            self._buffer,
            self._reference.device_mesh,
            self._placements or self._reference.placements,
        )


class _CarryGradients(torch.autograd.Function):
    """The loss of the chunks, whose backward hands the assembled gradients to the decoder."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *hiddens_and_gradients: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*hiddens_and_gradients[len(hiddens_and_gradients) // 2 :])
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        gradients = ctx.saved_tensors
        return (None, *gradients, *(None for _ in gradients))


def _check_tensors(value: Any, name: str, expected: str) -> None:
    several = isinstance(value, (tuple, list))
    for i, tensor in enumerate(value if several else [value]):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"LifecycleChunkedLoss got {_describe(tensor)} as {name}"
                + (f" {i}" if several else "")
                + f"; expected a tensor, {expected}"
            )


def _check_head_takes(lm_head: nn.Module, hiddens: Sequence[torch.Tensor]) -> None:
    """Refuse what the head's forward would refuse, but in words and before any collective."""
    size = getattr(lm_head, "in_features", None)
    weight = getattr(lm_head, "weight", None)
    for i, hidden in enumerate(hiddens):
        if isinstance(size, int) and hidden.shape[-1] != size:
            raise ValueError(
                f"prediction {i} has shape {tuple(hidden.shape)} and the head takes hidden states "
                f"[B, L, {size}]"
                + (
                    ": these are logits; set model._skip_lm_head = True"
                    if hidden.shape[-1] == getattr(lm_head, "out_features", None)
                    else "; pass the decoder's output, before the head"
                )
            )
        # A head that distributes its inputs does so in a hook, or in a forward of its own; FSDP's
        # hook gathers a weight that is a DTensor because it is sharded.
        converts = bool(lm_head._forward_pre_hooks) or "forward" in lm_head.__dict__
        if isinstance(weight, DTensor) and not isinstance(hidden, DTensor) and not converts:
            raise ValueError(
                f"the head's weight is a DTensor with placements {weight.placements}, and "
                f"prediction {i}, of shape {tuple(hidden.shape)}, is a plain tensor; parallelize "
                "the head with its inputs (parallelize_module), or pass hidden states on its mesh"
            )


def _check_aligned(hiddens: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
    if not hiddens or len(hiddens) != len(labels):
        raise ValueError(
            f"LifecycleChunkedLoss got {len(hiddens)} predictions and {len(labels)} labels; "
            "pass one of each, or tuples of the same, non-zero length"
        )
    for i, (hidden, label) in enumerate(zip(hiddens, labels, strict=True)):
        if hidden.ndim != 3 or not _same_sizes(label.shape[:2], hidden.shape[:2]):
            raise ValueError(
                f"prediction {i} has shape {tuple(hidden.shape)} and its labels "
                f"{tuple(label.shape)}; expected hidden states [B, L, D] and labels [B, L]. If the "
                "model returns logits of another length, set model._skip_lm_head = True"
            )
        if not _same_sizes(hidden.shape[:2], hiddens[0].shape[:2]):
            raise ValueError(
                f"prediction {i} has shape {tuple(hidden.shape)} and prediction 0 has "
                f"{tuple(hiddens[0].shape)}; all predictions are split alike and need one length"
            )
        if torch.is_grad_enabled() and hidden.requires_grad != hiddens[0].requires_grad:
            raise ValueError(
                f"prediction {i} has requires_grad={hidden.requires_grad} and prediction 0 has "
                f"requires_grad={hiddens[0].requires_grad}; run the loss once for each kind"
            )


def _check_loss_inputs(hidden: torch.Tensor, loss_inputs: dict[str, Any]) -> None:
    length = _local_length(hidden)
    for key, value in loss_inputs.items():
        # Of any size in dim 0, which may be broadcast. A rank's own part may be a plain tensor.
        if isinstance(value, torch.Tensor) and not (
            value.ndim > 1 and _same_sizes([_local_length(value)], [length])
        ):
            raise ValueError(
                f"loss input '{key}' has shape {tuple(value.shape)} and the hidden states "
                f"{tuple(hidden.shape)}; expected [B, L, ...], which is split along L. Pass what "
                "is not per token as something other than a tensor"
            )


def _same_sizes(sizes: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether the sizes are the same.

    Symbolic ones of unknown value are taken to be, which the traced graph asserts.
    """
    if len(sizes) != len(expected):
        return False
    for size, other in zip(sizes, expected, strict=True):
        if type(size) is type(other) is int and size == other:
            continue  # the usual case, without the machinery of tracing
        if not guard_or_true(size == other):
            return False
        torch._check(size == other)
    return True


def _local_length(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.shape[_SEQUENCE_DIM]


def _split(tensor: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Contiguous chunks along the sequence; of a DTensor, chunks of each rank's own part.

    Splitting a sequence-sharded DTensor globally would hand whole chunks to single ranks.
    """
    if not isinstance(tensor, DTensor):
        return _split_local(tensor, sizes)
    split = local_map(
        partial(_split_local, sizes=sizes),
        out_placements=(tensor.placements,) * len(sizes),
        in_placements=(tensor.placements,),
        device_mesh=tensor.device_mesh,
    )
    chunks: tuple[torch.Tensor, ...] = split(tensor)
    return chunks


def _split_local(tensor: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(c.contiguous() for c in torch.split(tensor, sizes, dim=_SEQUENCE_DIM))
