"""Multi-token prediction through the chunked loss: no logits of a whole sequence, for any depth.

DeepSeek-V3's decoder in torchtitan gives one prediction for the next token and one for each MTP
layer, the token after next and so on, all through one head. ``MTPLoss`` takes the logits of all of
them at once. Here the decoder returns hidden states (:func:`return_hidden_states`), and
:class:`MTPChunkedLoss` rolls the labels of the whole sequence, then runs head, loss and backward
chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import spmd_types as spmd
import torch
import torch.nn as nn
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.config import CompileConfig
from torchtitan.config.override import derive
from torchtitan.models.deepseek_v3.mtp import MTPDecoder, MTPLoss, roll_mtp_sequence

from titan_lifecycle.jobs.renamed_keys import HEAD_REDUCTION_OF_LOSS, with_renamed_fields
from titan_lifecycle.losses.chunked import LifecycleChunkedLoss

__all__ = ["AlignedMTPLoss", "MTPChunkedLoss", "return_hidden_states"]


class AlignedMTPLoss(MTPLoss):
    """torchtitan's ``MTPLoss`` of predictions whose labels are aligned with them already.

    ``main + mtp_scale / num_layers * (mtp_1 + mtp_2 + ...)``, each a sum over valid labels divided
    by ``global_valid_tokens``. The metrics ``loss/main_mean``, ``loss/mtp_1_mean``, ... are these
    terms without the weight. All have the same divisor, the main prediction's number of labels, as
    in ``MTPLoss``, although fewer labels are valid at a greater depth.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MTPLoss.Config):
        pass

    def __call__(
        self,
        pred: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The weighted loss and the metrics, from logits [B, L, V] and labels [B, L] a depth."""
        terms = [
            self.fn(logits, target, global_vocab_size=self.global_vocab_size)
            for logits, target in zip(pred, labels, strict=True)
        ]
        is_type_checking = spmd.is_type_checking()
        with spmd.no_typecheck():
            if global_valid_tokens is not None:
                terms = [term / global_valid_tokens for term in terms]
            loss = terms[0] + sum(terms[1:]) * (self.mtp_scale / (len(terms) - 1))
            terms = [term.detach() for term in terms]
            if is_type_checking:
                # As torchtitan's losses: what is divided by a scalar has no type of its own yet.
                for value in (loss, *terms):
                    spmd.assert_type(value, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        names = ("main", *(f"mtp_{depth}" for depth in range(1, len(terms))))
        return loss, {f"loss/{name}_mean": term for name, term in zip(names, terms, strict=True)}


class MTPChunkedLoss(LifecycleChunkedLoss):
    """``LifecycleChunkedLoss`` in the place of torchtitan's ``MTPLoss``.

    Flow for ``loss, metrics = loss_fn(hiddens, labels, global_valid_tokens, positions=positions)``:

    1. Labels [B, L] are rolled left by the depth of each prediction, once, over the whole
       sequence: a chunk's last labels are those of the next chunk's tokens. What would cross the
       end of a packed document, by ``positions`` [B, L], is ignored.
    2. Hidden states [B, L, D] and labels of all predictions are split alike. Per chunk the head
       runs on every prediction, then :class:`AlignedMTPLoss`, then one backward.

    Composition: as ``LifecycleChunkedLoss``. torchtitan's MTP models have no pipeline and no
    context parallelism, and refuse them.
    """

    @with_renamed_fields(reduction=HEAD_REDUCTION_OF_LOSS)
    @dataclass(kw_only=True, slots=True)
    class Config(LifecycleChunkedLoss.Config):
        loss_fn: BaseLoss.Config = field(default_factory=MTPLoss.Config)
        """torchtitan's MTP loss: the weight of the MTP layers, the vocabulary."""

        def __post_init__(self) -> None:
            # Not super(): the class that dataclass(slots=True) makes is another one than this.
            LifecycleChunkedLoss.Config.__post_init__(self)
            if type(self.loss_fn) not in (MTPLoss.Config, AlignedMTPLoss.Config):
                raise ValueError(
                    f"loss.loss_fn is a {type(self.loss_fn).__qualname__}; MTPChunkedLoss takes "
                    "torchtitan.models.deepseek_v3.MTPLoss"
                )

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        aligned = derive(config.loss_fn, AlignedMTPLoss.Config)
        super().__init__(replace(config, loss_fn=aligned), compile_config=compile_config)

    def __call__(  # type: ignore[override]  # narrower: several predictions of one sequence
        self,
        pred: Sequence[torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The weighted loss, summed over chunks, and :class:`AlignedMTPLoss`'s metrics.

        Args:
            pred: Hidden states [B, L, D] of the main prediction, then of each MTP layer.
            labels: Token ids [B, L] of the main prediction.
            global_valid_tokens: Scalar that normalizes the loss.
            positions: Positions [B, L], which restart with each packed document.

        Raises:
            ValueError: There is one prediction only, there are no positions, or shapes differ.
        """
        if isinstance(pred, torch.Tensor) or len(pred) < 2:
            raise ValueError(
                "MTPChunkedLoss takes the hidden states of the main prediction and of at least "
                "one MTP layer; use a model with MTP layers, or LifecycleChunkedLoss"
            )
        if positions is None:
            raise ValueError(
                "MTPChunkedLoss needs positions, to keep the labels of an MTP layer inside their "
                "document; pass positions=, as torchtitan's trainer does"
            )
        rolled = [
            roll_mtp_sequence(labels, shift=depth, fill_value=IGNORE_INDEX, positions=positions)
            for depth in range(1, len(pred))
        ]
        return super().__call__(tuple(pred), (labels, *rolled), global_valid_tokens)


def return_hidden_states(model: nn.Module) -> None:
    """Let an MTP decoder that skips its head return the hidden states of every prediction.

    torchtitan computes them and then refuses to return them. Its forward also goes without a head,
    where there is none, so that it runs here with the head out of sight. Nothing but the forward of
    this instance changes: names, parameters, FSDP's groups and hooks stay.

    Raises:
        TypeError: ``model`` is not an ``MTPDecoder``.
    """
    if not isinstance(model, MTPDecoder):
        raise TypeError(
            f"return_hidden_states takes torchtitan's MTPDecoder, got a {type(model).__name__}"
        )
    forward = model.forward

    def forward_without_head(*args: Any, **kwargs: Any) -> Any:
        if not model._skip_lm_head:
            return forward(*args, **kwargs)
        head = model.lm_head
        model._skip_lm_head, model.lm_head = False, None
        try:
            return forward(*args, **kwargs)
        finally:
            model._skip_lm_head, model.lm_head = True, head

    model.forward = forward_without_head
