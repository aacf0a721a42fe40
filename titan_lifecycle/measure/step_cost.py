"""What an optimizer step costs on one rank: collectives, memory and time."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.nn as nn

from titan_lifecycle.fsdp_lifecycle import ResidencyMonitor
from titan_lifecycle.jobs.errors import write_text
from titan_lifecycle.measure.collectives import CollectiveCounts
from titan_lifecycle.measure.throughput import tokens_per_second_per_device

__all__ = ["StepCost", "StepMeasurements", "deferred_gradients"]

_MEASURED_FOR_RESIDENCY = 1


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one optimizer step on one rank.

    Collectives are those of the last step. The first step warms up; the second gives the peaks of
    weights and gradients, and is slowed by looking for them; seconds are the median and
    the minimum over the others, and the peak of memory is over all but the first.
    """

    num_steps: int
    step_seconds: float
    fastest_step_seconds: float
    tokens_per_second_per_device: float
    """torchtitan's ``tps``, by the median step."""
    calls: dict[str, int]
    num_bytes: dict[str, int]
    peak_gathered_weight_bytes: int
    peak_unsharded_gradient_bytes: int
    peak_memory_bytes: int
    """Peak resident set of the process on the CPU, peak reserved memory on a device."""

    @classmethod
    def read(cls, path: Path) -> StepCost:
        return cls(**json.loads(path.read_text()))


class StepMeasurements:
    """Enter it around each optimizer step; write the result at the end."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._residency = ResidencyMonitor(models)
        self._seconds: list[float] = []
        self._started = 0.0
        self._peak_memory_bytes = 0

    def __enter__(self) -> None:
        if len(self._seconds) == _MEASURED_FOR_RESIDENCY:
            self._residency.__enter__()
        self._started = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        if len(self._seconds) == _MEASURED_FOR_RESIDENCY:
            self._residency.__exit__(*exc_info)
        self._seconds.append(time.perf_counter() - self._started)
        if len(self._seconds) > 1:
            # Here: torchtitan picks its device when it is imported.
            from torchtitan.tools.utils import device_module

            # torchtitan resets the peak when it logs a step: take the largest.
            peak = device_module.memory_stats().get("reserved_bytes.all.peak", 0)
            self._peak_memory_bytes = max(self._peak_memory_bytes, peak)

    def write(
        self,
        path: Path,
        *,
        collectives: CollectiveCounts,
        tokens_per_step: int,
        non_data_parallel_size: int,
    ) -> StepCost:
        """Write the cost, from this rank's tokens in a step; see `tokens_per_second_per_device`."""
        timed = self._seconds[_MEASURED_FOR_RESIDENCY + 1 :]
        if not timed:
            raise RuntimeError(
                f"lifecycle.report_file needs at least {_MEASURED_FOR_RESIDENCY + 2} steps in one "
                f"run, and this one had {len(self._seconds)}; raise training.steps"
            )
        step_seconds = statistics.median(timed)
        cost = StepCost(
            num_steps=len(self._seconds),
            step_seconds=step_seconds,
            fastest_step_seconds=min(timed),
            tokens_per_second_per_device=tokens_per_second_per_device(
                tokens_per_step, step_seconds, non_data_parallel_size
            ),
            calls=dict(collectives.calls),
            num_bytes=dict(collectives.num_bytes),
            peak_gathered_weight_bytes=self._residency.peak_weight_bytes,
            peak_unsharded_gradient_bytes=self._residency.peak_gradient_bytes,
            peak_memory_bytes=self._peak_memory_bytes,
        )
        write_text(path, json.dumps(asdict(cost), indent=2) + "\n")
        return cost


def deferred_gradients(bytes_per_group: dict[str, int]) -> str:
    """What deferring the reduction keeps alive, as a sentence, from the bytes of each group."""
    return (
        f"gradient_reduction = last_microbatch keeps {sum(bytes_per_group.values()):,} bytes of "
        f"unsharded gradients in {len(bytes_per_group)} FSDP groups on this rank between "
        "microbatches"
    )
