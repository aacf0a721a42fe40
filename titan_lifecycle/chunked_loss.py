"""A chunked loss whose inner backwards are scoped: a drop-in for torchtitan's wrapper.

It knows nothing of FSDP: :func:`~titan_lifecycle.fsdp_lifecycle.fsdp_partial_backwards` does that
part, see [Note: Partial backwards and FSDP finalization] there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import spmd_types as spmd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import local_map
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_true
from torchtitan.components.loss import (
    IGNORE_INDEX,
    BaseLoss,
    ChunkedLossWrapper,
    CrossEntropyLoss,
)
from torchtitan.config import CompileConfig
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from titan_lifecycle.fsdp_lifecycle import PartialBackwardHooks, fsdp_partial_backwards

__all__ = ["HeadWeightLoss", "LifecycleChunkedLoss", "LinearCrossEntropyLoss"]

_DEFAULT_NUM_CHUNKS = 8
_SEQUENCE_DIM = 1


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

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        num_chunks: int | None = None
        """Number of chunks; their lengths differ by at most one token. Default 8."""

        chunk_tokens: int | None = None
        """Length of a chunk, in tokens of the rank's own sequence, instead of num_chunks; the
        last chunk may be shorter."""

        loss_fn: BaseLoss.Config = field(default_factory=CrossEntropyLoss.Config)
        """Inner loss, applied to each chunk's logits."""

        reduction: Literal["compatible", "coalesced"] = "compatible"
        """Who reduces the head's gradients where there is a choice. compatible: the chunk loop,
        bit for bit as torchtitan's wrapper. coalesced: the decoder's backward, together with the
        rest of the head's FSDP group, one reduce-scatter fewer."""

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
        self.reduction = config.reduction
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
            _check_head_is_linear(lm_head, self.loss_fn)
        _check_tensors(pred, "prediction", "hidden states [B, L, D]")
        _check_tensors(labels, "labels", "token ids [B, L]")
        several = not isinstance(pred, torch.Tensor)
        hiddens = (pred,) if isinstance(pred, torch.Tensor) else tuple(pred)
        targets = (labels,) if isinstance(labels, torch.Tensor) else tuple(labels)
        _check_aligned(hiddens, targets)
        _check_head_takes(lm_head, hiddens)
        _check_loss_inputs(hiddens[0], loss_inputs)

        outer_backward = torch.is_grad_enabled() and hiddens[0].requires_grad
        run_backward = outer_backward or (
            torch.is_grad_enabled() and any(p.requires_grad for p in lm_head.parameters())
        )

        with spmd.local():
            sizes = self._chunk_sizes(_local_length(hiddens[0]))
            hidden_chunks = [
                tuple(c.detach().requires_grad_(outer_backward) for c in _split(h, sizes))
                for h in hiddens
            ]
            label_chunks = [_split(t, sizes) for t in targets]
            input_chunks = {
                key: _split(value, sizes)
                for key, value in loss_inputs.items()
                if isinstance(value, torch.Tensor)
            }
            gradients = [_SequenceGradient(h) for h in hiddens] if outer_backward else []
            total_loss = _zero_loss(hiddens[0])
            metrics: dict[str, torch.Tensor] = {}
            backward = _InnerBackward() if run_backward else None

            with fsdp_partial_backwards(
                lm_head,
                run_backward=run_backward,
                outer_backward_follows=outer_backward,
                reduction=self.reduction,
            ) as hooks:
                for i in range(len(sizes)):
                    chunk_labels = tuple(c[i] for c in label_chunks)
                    chunk_loss, chunk_metrics = self._run_chunk(
                        lm_head,
                        hooks,
                        tuple(c[i] for c in hidden_chunks),
                        chunk_labels if several else chunk_labels[0],
                        global_valid_tokens,
                        loss_inputs | {key: value[i] for key, value in input_chunks.items()},
                        several=several,
                        is_last=i == len(sizes) - 1,
                        backward=backward,
                        gradients=gradients,
                    )
                    metrics = self._combine_chunk_metrics(metrics, chunk_metrics)
                    total_loss = total_loss + chunk_loss

        if not run_backward:
            return total_loss, metrics
        with spmd.no_typecheck():
            if not outer_backward:
                # The trainer and the pipeline stage call backward() on what they get.
                return total_loss.requires_grad_(), metrics
            return (
                _CarryGradients.apply(total_loss, *hiddens, *(g.result() for g in gradients)),
                metrics,
            )

    def _chunk_sizes(self, length: int) -> list[int]:
        if isinstance(length, int) and length == 0:
            raise ValueError(
                "LifecycleChunkedLoss got hidden states of length 0, [B, 0, D]; expected at least "
                "one token. Skip the loss of an empty sequence, on all ranks alike"
            )
        if self.chunk_tokens is not None:
            if free_unbacked_symbols(length):
                raise ValueError(
                    f"loss.chunk_tokens ({self.chunk_tokens}) gives an unknown number of chunks of "
                    "a traced sequence of unknown length; set loss.num_chunks instead"
                )
            whole, rest = divmod(int(length), self.chunk_tokens)
            return [self.chunk_tokens] * whole + ([rest] if rest else [])
        n = self.num_chunks
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

    def _run_chunk(
        self,
        lm_head: nn.Module,
        hooks: PartialBackwardHooks,
        chunks: tuple[torch.Tensor, ...],
        labels: torch.Tensor | tuple[torch.Tensor, ...],
        global_valid_tokens: torch.Tensor | None,
        loss_inputs: dict[str, Any],
        *,
        several: bool,
        is_last: bool,
        backward: _InnerBackward | None,
        gradients: list[_SequenceGradient],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The inner loss of one chunk, backpropagated; the head runs once per prediction."""
        if isinstance(self.loss_fn, HeadWeightLoss):
            weight: Any = lm_head.weight
            bias = getattr(lm_head, "bias", None)
            inputs = loss_inputs | {"weight": weight, "bias": bias}

            def loss_from_weight(*hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
                pred = hidden if several else hidden[0]
                return _checked(self.loss_fn, pred, labels, global_valid_tokens, inputs)

            if is_last:
                hooks.before_last_forward()
            # The loss runs as the head's forward: hooks on it cast the hidden states, as a
            # mixed-precision policy says, and others see it like any other forward.
            with _forward_replaced(lm_head, loss_from_weight):
                loss, metrics = lm_head(*chunks)
            loss = hooks.after_forward(loss)
            sources = [t for t in (*chunks, weight, bias) if t is not None and t.requires_grad]
        else:
            logits = []
            for i, chunk in enumerate(chunks):
                if is_last and i == len(chunks) - 1:
                    hooks.before_last_forward()
                logits.append(lm_head(chunk))
            outputs = hooks.after_forward(tuple(logits))
            loss, metrics = _checked(
                self.loss_fn,
                outputs if several else outputs[0],
                labels,
                global_valid_tokens,
                loss_inputs,
            )
            sources = [t for t in outputs if t.requires_grad]

        if backward is not None:
            with spmd.no_typecheck():
                backward(loss, sources, chunks)
                for gradient, chunk in zip(gradients, chunks, strict=False):
                    gradient.append(chunk)
        return loss.detach(), metrics


def _checked(
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


def _check_head_is_linear(lm_head: nn.Module, loss_fn: HeadWeightLoss) -> None:
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


def _zero_loss(reference: torch.Tensor) -> torch.Tensor:
    zero = reference.new_zeros((), dtype=torch.float32)
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        # The type of torchtitan's losses: a partial sum over data, whole on each TP rank.
        for axis, dst in {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I}.items():
            zero = spmd.mutate_type(zero, axis, src=spmd.R, dst=dst)
    return zero


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
