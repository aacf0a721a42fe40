"""Counts the collectives that FSDP issues, with c10d's own pre-hooks."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch.nn as nn

from titan_lifecycle.fsdp_lifecycle import fsdp_process_groups

__all__ = ["CollectiveCounter", "CollectiveCounts"]

# c10d's names of what FSDP2 calls, and the tensors whose size is what is communicated: the whole
# gathered weight, the whole unreduced gradient.
_OPERATIONS = {
    "ALLGATHER_BASE": ("all_gather", "output_tensors"),
    "REDUCE_SCATTER_BASE": ("reduce_scatter", "input_tensors"),
    "ALLREDUCE": ("all_reduce", "input_tensors"),
}

_hook_ids = itertools.count(7_000)


@dataclass(slots=True)
class CollectiveCounts:
    """Calls and payload bytes by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``.

    A payload is the whole tensor, gathered or to be reduced. What a rank sends is less by a
    factor that depends on the algorithm, (n - 1) / n for a ring over n ranks.
    """

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)


class CollectiveCounter:
    """While entered, counts the collectives on the process groups of the given models' FSDP.

    Counting happens where c10d is called, on this rank, in every thread: nothing is intercepted
    and no collective is added. It works with any backend and costs one Python call a collective.
    Collectives that others issue on the same process groups meanwhile count too, so enter it
    around forwards and backwards only. A captured CUDA graph counts at capture, not at replay.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self.counts = CollectiveCounts()
        self._process_groups = fsdp_process_groups(models)
        self._hook_id = next(_hook_ids)

    def reset(self) -> None:
        self.counts = CollectiveCounts()

    def __enter__(self) -> CollectiveCounter:
        for group in self._process_groups:
            group.register_pre_hook(self._hook_id, self._record)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for group in self._process_groups:
            group.unregister_pre_hook(self._hook_id)

    def _record(self, call: Any) -> None:
        if (operation := _OPERATIONS.get(call.name.name)) is None:
            return
        name, tensors = operation
        self.counts.calls[name] += 1
        self.counts.num_bytes[name] += sum(t.nbytes for t in getattr(call, tensors))
