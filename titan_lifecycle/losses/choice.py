"""Which loss a config gets: the one place that decides, for the trainer and for ``config``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config.override import OverrideConfig, derive
from torchtitan.models.deepseek_v3.mtp import MTPLoss

from titan_lifecycle.jobs.renamed_keys import HEAD_REDUCTION
from titan_lifecycle.losses.chunked import LifecycleChunkedLoss
from titan_lifecycle.losses.from_weight import HeadWeightLoss
from titan_lifecycle.losses.mtp import MTPChunkedLoss
from titan_lifecycle.overrides import (
    CHUNKED_LOSS,
    CHUNKED_MTP_LOSS,
    chunked_loss,
    chunked_mtp_loss,
    imported,
)

__all__ = ["check_head_reduction", "choose_loss", "lifecycle_loss", "takes_head_weight"]


def lifecycle_loss(loss: Any) -> Any:
    """``loss`` with exactly torchtitan's ``ChunkedLossWrapper.Config`` replaced, else as it is."""
    return chunked_loss(loss) if type(loss) is ChunkedLossWrapper.Config else loss


def choose_loss(config: Any) -> tuple[Any, OverrideConfig]:
    """The loss to train with, and the overrides that are left to apply.

    The overrides of this package are applied here, so that what ``titan-lifecycle config`` shows
    is what runs. Choosing again gives the same loss.

    Args:
        config: A ``LifecycleTrainer.Config``, valid. It is not changed.
    """
    override = config.override
    if not config.lifecycle.enabled:
        return _torchtitans_loss(config), _without_ours(override)
    loss = lifecycle_loss(config.loss)
    if type(loss) is MTPLoss.Config and CHUNKED_MTP_LOSS in imported(override):
        loss = chunked_mtp_loss(loss, **_arguments(override, CHUNKED_MTP_LOSS))
    elif type(loss) is LifecycleChunkedLoss.Config and CHUNKED_LOSS in imported(override):
        loss = replace(loss, **_arguments(override, CHUNKED_LOSS))
    check_head_reduction(loss)
    return loss, _without_ours(override)


def check_head_reduction(loss: Any) -> None:
    """Refuse the loss's own ``head_reduction`` where there is a ``[lifecycle]`` section.

    Raises:
        ValueError: It is set.
    """
    if (value := getattr(loss, "head_reduction", None)) is not None:
        raise ValueError(
            f"loss.head_reduction = {value!r} is for torchtitan's own trainer; here, set "
            f"{HEAD_REDUCTION} = {value!r}"
        )


def takes_head_weight(loss: Any) -> bool:
    """Whether the loss config has an inner loss that is computed from the head's weight."""
    owner = getattr(getattr(loss, "loss_fn", None), "_owner", None)
    return owner is not None and issubclass(owner, HeadWeightLoss)


def _torchtitans_loss(config: Any) -> Any:
    """torchtitan's own loss with the settings that it knows."""
    loss = config.loss
    if type(loss) is MTPChunkedLoss.Config:
        return loss.loss_fn
    if type(loss) is not LifecycleChunkedLoss.Config:
        return loss
    inner = loss.loss_fn
    if takes_head_weight(loss):
        # torchtitan's wrapper hands logits to its inner loss, which this one does not take.
        inner = derive(inner, CrossEntropyLoss.Config)
    num_tokens = config.training.seq_len // config.parallelism.context_parallel_degree
    wanted = loss.num_chunks or ChunkedLossWrapper.Config().num_chunks
    if loss.chunk_tokens is not None:
        wanted = math.ceil(num_tokens / loss.chunk_tokens)
        # torchtitan's wrapper takes chunks of one length only.
        wanted = max(n for n in range(1, wanted + 1) if num_tokens % n == 0)
    return derive(loss, ChunkedLossWrapper.Config, num_chunks=wanted, loss_fn=inner)


def _arguments(override: OverrideConfig, target: str) -> dict[str, Any]:
    """What the entry for ``target`` hands to its override."""
    for entry in override.imports:
        if not isinstance(entry, str) and entry[0] == target:
            return dict(entry[1])
    return {}


def _without_ours(override: OverrideConfig) -> OverrideConfig:
    entries = list(zip(override.imports, imported(override), strict=True))
    left = [entry for entry, target in entries if target not in (CHUNKED_LOSS, CHUNKED_MTP_LOSS)]
    return override if len(left) == len(entries) else replace(override, imports=left)
