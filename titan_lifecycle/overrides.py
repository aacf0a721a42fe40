"""The chunked losses as ``override.imports`` targets.

``chunked_loss`` is for torchtitan's own launcher; a job file has it anyway:

``torchrun -m torchtitan.train --module llama3 --config llama3_debugmodel --override.imports
titan_lifecycle.overrides.chunked_loss``, with fields of the loss as JSON where wanted:
``'titan_lifecycle.overrides.chunked_loss={"head_reduction": "coalesced"}'``.

``chunked_mtp_loss`` needs this package's trainer, which job files and ``lifecycle_config`` use: the
model must return hidden states, and torchtitan builds a model's root as it was before overrides.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config.override import OverrideConfig, derive, override
from torchtitan.models.deepseek_v3.mtp import MTPLoss

from titan_lifecycle.jobs.renamed_keys import HEAD_REDUCTION_OF_LOSS, refuse_renamed
from titan_lifecycle.losses.chunked import LifecycleChunkedLoss
from titan_lifecycle.losses.mtp import MTPChunkedLoss

__all__ = ["CHUNKED_LOSS", "CHUNKED_MTP_LOSS", "chunked_loss", "chunked_mtp_loss", "imported"]

CHUNKED_LOSS = f"{__name__}.chunked_loss"
CHUNKED_MTP_LOSS = f"{__name__}.chunked_mtp_loss"


# Exact: GraphTrainer's subclass owns its parameter gradients and must stay.
@override(  # type: ignore[misc]  # torchtitan's decorator is Any to mypy
    target=ChunkedLossWrapper.Config,
    exact=True,
    description="Own FSDP's lifecycle around the chunked loss",
)
def chunked_loss(config: ChunkedLossWrapper.Config, **fields: Any) -> LifecycleChunkedLoss.Config:
    """``config`` as a ``LifecycleChunkedLoss.Config``.

    Args:
        config: torchtitan's config. Its default number of chunks stays unset, so that
            ``chunk_tokens`` can take its place.
        **fields: Fields of ``LifecycleChunkedLoss.Config`` to set.
    """
    refuse_renamed("chunked_loss", fields, {"reduction": HEAD_REDUCTION_OF_LOSS})
    if config.num_chunks == type(config)().num_chunks:
        fields.setdefault("num_chunks", None)
    derived: LifecycleChunkedLoss.Config = derive(config, LifecycleChunkedLoss.Config, **fields)
    return derived


@override(  # type: ignore[misc]
    target=MTPLoss.Config,
    exact=True,
    description="Multi-token prediction without full-sequence logits",
)
def chunked_mtp_loss(config: MTPLoss.Config, **fields: Any) -> MTPChunkedLoss.Config:
    """``config`` as the inner loss of an ``MTPChunkedLoss.Config``, with these fields set."""
    return MTPChunkedLoss.Config(loss_fn=config, **fields)


def imported(config: OverrideConfig) -> list[str]:
    """The targets in ``override.imports``, without their arguments."""
    return [entry if isinstance(entry, str) else entry[0] for entry in config.imports]
