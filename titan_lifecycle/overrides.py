"""For torchtitan's own launcher: the chunked loss as an ``override.imports`` target.

``torchrun -m torchtitan.train --module llama3 --config llama3_debugmodel --override.imports
titan_lifecycle.overrides.chunked_loss``, with fields of the loss as JSON where wanted:
``'titan_lifecycle.overrides.chunked_loss={"reduction": "coalesced"}'``.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config.override import derive, override

from titan_lifecycle.chunked_loss import LifecycleChunkedLoss

__all__ = ["chunked_loss", "lifecycle_loss"]


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
    if config.num_chunks == type(config)().num_chunks:
        fields.setdefault("num_chunks", None)
    derived: LifecycleChunkedLoss.Config = derive(config, LifecycleChunkedLoss.Config, **fields)
    return derived


def lifecycle_loss(loss: Any) -> Any:
    """``loss`` with exactly torchtitan's ``ChunkedLossWrapper.Config`` replaced, else as it is."""
    return chunked_loss(loss) if type(loss) is ChunkedLossWrapper.Config else loss
